"""How a running deployment speculates, changed by an operator: from Python, or ``dspark-ray mode``.

Reaches every verifier replica of a model through Serve's handle, so whoever may use the Ray cluster may do it, and
nobody over HTTP. A replica that starts later begins with the configuration.
"""

import logging
from typing import Any, get_args

import click
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from dspark_ray.config import VerifyMode
from dspark_ray.errors import ConfigError
from dspark_ray.protocol import SpeculationSetting
from dspark_ray.serving.names import VERIFIER_PREFIX, deployment_suffix

MODES = (*get_args(VerifyMode), "off", "configured")
TIMEOUT_S = 30.0


def set_speculation(
    model: str, setting: SpeculationSetting, *, app: str | None = None, timeout_s: float = TIMEOUT_S
) -> list[dict[str, Any]]:
    """Have all running verifier replicas of a model speculate as told, from their next step on.

    Args:
        model: model id.
        setting: what overrides configuration and policy; `SpeculationSetting()` takes everything back.
        app: the Serve application; found by the model when None.
        timeout_s: for all replicas together.

    Returns:
        ``replica``, ``mode`` and ``tau`` in use of each replica.

    Raises:
        ConfigError: no application, or more than one, serves the model; or it has no drafter of ours.
        TimeoutError: a replica did not answer.
    """
    handle = verifier_handle(model, app)
    try:
        return handle.broadcast("set_speculation", setting).results(timeout_s=timeout_s)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ConfigError):
            raise error.cause from None
        raise


def verifier_handle(model: str, app: str | None = None) -> DeploymentHandle:
    """The handle of a model's verifiers.

    Args:
        model: model id.
        app: the Serve application; found by the model when None.

    Raises:
        ConfigError: no application, or more than one, serves the model.
    """
    deployment = VERIFIER_PREFIX + deployment_suffix(model)
    return serve.get_deployment_handle(deployment, app or _application_of(deployment, model))


def _application_of(deployment: str, model: str) -> str:
    found = [name for name, status in serve.status().applications.items() if deployment in status.deployments]
    if len(found) != 1:
        which = f"several applications serve it: {', '.join(sorted(found))}" if found else "none serves it"
        raise ConfigError(f"model {model}: {which}")
    return found[0]


@click.command()
@click.argument("model")
@click.argument("mode", type=click.Choice(MODES))
@click.option("--tau", type=click.FloatRange(0, 1), help="Threshold, in modes that have one.")
@click.option("--verify-len", type=click.IntRange(min=0), help="Verified drafts, in mode fixed_len.")
@click.option("--app", help="Serve application; needed if several serve the model.")
def mode_command(model: str, mode: str, tau: float | None, verify_len: int | None, app: str | None) -> None:
    """Change how the verifiers of MODEL speculate, while they run.

    MODE is a scheduling mode, "off" for plain decoding, or "configured" to take everything back. Connects to the Ray
    cluster as any driver does (RAY_ADDRESS, RAY_AUTH_TOKEN). Replicas that start later begin with the configuration.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise ConfigError(f"no Ray cluster found, set RAY_ADDRESS: {error}") from None
    try:
        wanted: Any = None if mode == "configured" else mode
        setting = SpeculationSetting(mode=wanted, tau=tau, fixed_len=verify_len)
        for answer in set_speculation(model, setting, app=app):
            threshold = "" if answer["tau"] is None else f", tau {answer['tau']:.2f}"
            click.echo(f"{answer['replica']}: {answer['mode']}{threshold}")
    finally:
        ray.shutdown()
