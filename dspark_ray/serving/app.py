"""The Serve application: ``import_path: dspark_ray.serving.app:build_app`` of a Serve config file."""

from typing import Any

from ray import serve
from ray.llm._internal.serve.core.server.builder import build_llm_deployment
from ray.serve import Application

from dspark_ray.config import AppConfig, ModelConfig, parse_app_config
from dspark_ray.errors import ConfigError
from dspark_ray.serving.drafter import DrafterServer, drafter_bundle
from dspark_ray.serving.engine_args import (
    HEALTH_CHECK_PERIOD_S,
    HEALTH_CHECK_TIMEOUT_S,
    llm_config,
    scaling_options,
)
from dspark_ray.serving.ingress import make_ingress
from dspark_ray.serving.names import (
    DRAFTER_PREFIX,
    INGRESS_NAME,
    PREFILL_PREFIX,
    VERIFIER_PREFIX,
    deployment_suffix,
)
from dspark_ray.serving.prefill import DataParallelPrefillServer, PrefillServer
from dspark_ray.serving.verifier import DataParallelVerifierServer, VerifierServer
from dspark_ray.sources import check_sources

UNBOUNDED = -1


def build_app(args: dict[str, Any]) -> Application:
    """Build the application: verifier, prefill and drafter deployments of each model, one ingress.

    Args:
        args: the ``args`` of the Serve config file, an `AppConfig`.

    Raises:
        ConfigError: the configuration cannot work; the message names the field.
    """
    config = parse_app_config(args)
    check_sources(config)
    _check_names(config)
    verifiers = {model.id: _build_verifier(model, config) for model in config.models}
    return _build_ingress(config, verifiers)


def _check_names(config: AppConfig) -> None:
    """Refuse ids that differ, but not as names of deployments, where "/" and "." are written otherwise."""
    seen: dict[str, str] = {}
    for model in config.models:
        name = deployment_suffix(model.id)
        if name in seen:
            raise ConfigError(
                f"models: ids {seen[name]!r} and {model.id!r} name the same deployment ({name!r}): rename one"
            )
        seen[name] = model.id


def _build_verifier(model: ModelConfig, config: AppConfig) -> Application:
    has_prefill = model.prefill.replicas > 0 or model.prefill.autoscaling is not None
    data_parallel = model.target.data_parallel_size > 1
    own = {"model": model, "config": config}
    bind_kwargs: dict[str, Any] = dict(own)
    if has_prefill:
        bind_kwargs["prefill_server"] = build_llm_deployment(
            llm_config(model, model.prefill, config, disaggregated=True),
            bind_kwargs=own,
            name_prefix=PREFILL_PREFIX,
            deployment_cls=DataParallelPrefillServer if data_parallel else PrefillServer,
        )
    if model.drafter.placement == "remote":
        bind_kwargs["drafter_pool"] = _build_drafters(model, config)
    return build_llm_deployment(
        llm_config(model, model.verifier, config, disaggregated=has_prefill),
        name_prefix=VERIFIER_PREFIX,
        bind_kwargs=bind_kwargs,
        deployment_cls=DataParallelVerifierServer if data_parallel else VerifierServer,
    )


def _build_drafters(model: ModelConfig, config: AppConfig) -> Application:
    role = model.drafter
    return serve.deployment(
        DrafterServer,
        name=DRAFTER_PREFIX + deployment_suffix(model.id),
        **scaling_options(role, target_ongoing_requests=role.max_ongoing_requests),
        max_ongoing_requests=role.max_ongoing_requests,
        user_config={},
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=role.graceful_shutdown_timeout_s,
        # The replica reserves nothing itself: its drafting actor takes the bundle, on the same node.
        ray_actor_options={"num_cpus": 0},
        placement_group_bundles=[drafter_bundle(role)],
        placement_group_strategy="STRICT_PACK",
    ).bind(model, config)


def _build_ingress(config: AppConfig, verifiers: dict[str, Application]) -> Application:
    role = config.ingress
    return serve.deployment(
        make_ingress(config.security),
        name=INGRESS_NAME,
        **scaling_options(role, target_ongoing_requests=role.max_ongoing_requests / 2),
        # The ingress itself refuses what is beyond its bound, in OpenAI's shape; Serve's proxy would not.
        max_ongoing_requests=2 * role.max_ongoing_requests,
        max_queued_requests=UNBOUNDED,
        user_config={},
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=role.graceful_shutdown_timeout_s,
        ray_actor_options={
            "num_cpus": role.cpus,
            "num_gpus": role.gpus,
            "resources": dict(role.resources),
            "runtime_env": {"env_vars": dict(role.env)},
        },
    ).bind(config, verifiers)
