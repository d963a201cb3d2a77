"""What the engine is told: ``additional_config={"dspark": {...}}``, validated where the worker starts."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from dspark_ray.config import FrozenModel, ModelConfig, SchedulingConfig
from dspark_ray.errors import ConfigError
from dspark_ray.sources import resolve_source

PROPOSER_CLASS = "dspark_ray.target.proposer.DSparkProposer"
SCHEDULER_CLASS = "dspark_ray.target.scheduler.DSparkScheduler"


class DrafterAddress(FrozenModel):
    """One drafter of the pool that the engine starts with; later ones come with `TargetControl`."""

    replica: str
    """Its name."""
    endpoint: str
    """Where its ZeroMQ socket listens, such as tcp://10.0.0.3:5555."""


class TargetOptions(FrozenModel):
    """Options of the shim in one engine."""

    placement: Literal["none", "remote", "colocated", "prefill"] = "none"
    """Where drafts come from; prefill: no drafts, but prompt features are kept for a verifier to fetch."""
    checkpoint: Path | None = None
    """Folder of the draft checkpoint: its taps and feature projection, and all of it when colocated."""
    exactness: Literal["coupled", "ratio"] = "coupled"
    """How drafts are accepted (dspark-spec.md section 3)."""
    scheduling: SchedulingConfig = SchedulingConfig()
    """Verify lengths, until `TargetControl` says otherwise."""
    tau: float = Field(default=0.2, ge=0, le=1)
    """Survival threshold of the modes that have one from the cluster's load, until a policy arrives."""
    window_tokens: int = Field(default=256, ge=16)
    """Feature rows kept for each request; the checkpoint's own window when that is smaller."""
    cache_mib: float = Field(default=256.0, gt=0)
    """Context cache of a colocated drafter, in MiB."""
    prefix_features_mib: float = Field(default=64.0, ge=0)
    """Memory for features of shared prefixes; used when the engine caches prefixes."""
    refeed_rows_per_step: int = Field(default=1024, ge=16)
    """Feature rows sent in one step at most, so that a restarted drafter is fed over several steps."""
    drafters: tuple[DrafterAddress, ...] = ()
    """Pool to begin with (remote)."""
    deadline_ms: float | None = Field(default=None, gt=0)
    """Longest wait for one draft call; follows a running estimate when unset."""
    secret_env: str = "DSPARK_SECRET"  # noqa: S105 - the name of a variable, not a secret
    """Environment variable with the deployment's shared secret; connections are open when it is not set."""
    handoff_bind: str = "tcp://127.0.0.1:*"
    """Endpoint a prefill worker binds for prompt features: the node's address, * for a free port."""
    handoff_mib: float = Field(default=64.0, gt=0)
    """Memory for prompt features that wait to be fetched."""
    handoff_lifetime_s: float = Field(default=60.0, gt=0)
    """How long they wait."""
    seed: int = 0
    """Of the choice of rounds that are verified in full."""

    @property
    def verifies(self) -> bool:
        """Whether the shim drafts and verifies here."""
        return self.placement in ("remote", "colocated")

    @model_validator(mode="after")
    def _checkpoint_when_tapping(self) -> Self:
        if self.placement != "none" and self.checkpoint is None:
            raise ValueError(f"checkpoint is needed with placement {self.placement!r}")
        return self


def target_options(
    model: ModelConfig, *, prefills: bool, secret_env: str, host: str = "127.0.0.1"
) -> TargetOptions:
    """What one model's engines are told; the drafters of a remote pool follow at run time.

    Args:
        model: as configured.
        prefills: whether this is a prefill replica's engine.
        secret_env: SecurityConfig.secret_env.
        host: address of this node, on which a prefill worker offers prompt features.

    Raises:
        ConfigError: the drafter's source is not there.
    """
    drafter = model.drafter
    if drafter.source is None or drafter.placement not in ("remote", "colocated"):
        return TargetOptions()
    checkpoint = resolve_source(drafter.source, f"model {model.id}: drafter.source")
    return TargetOptions.model_validate(
        {
            "placement": "prefill" if prefills else drafter.placement,
            "checkpoint": checkpoint,
            "exactness": model.exactness,
            "scheduling": model.scheduling,
            "window_tokens": drafter.window_tokens,
            "cache_mib": drafter.cache_mib,
            "deadline_ms": drafter.deadline_ms,
            "secret_env": secret_env,
            "handoff_bind": f"tcp://{host}:*",
        }
    )


def engine_arguments(options: TargetOptions, block_size: int, *, gpu: bool = False) -> dict[str, Any]:
    """The AsyncEngineArgs that put the shim into an engine.

    Args:
        options: of the engine.
        block_size: γ, drafts a round; only used where drafts are verified.
        gpu: whether the engine runs on GPUs.
    """
    worker = "gpu_worker.DSparkGPUWorker" if gpu else "cpu_worker.DSparkCPUWorker"
    arguments: dict[str, Any] = {
        "worker_cls": f"dspark_ray.target.{worker}",
        "additional_config": {"dspark": options.model_dump(mode="json")},
    }
    if options.verifies:
        arguments |= {
            "scheduler_cls": SCHEDULER_CLASS,
            "per_request_spec_decode_metrics": "summary",
            "speculative_config": {
                "method": "custom_class",
                "model": PROPOSER_CLASS,
                "num_speculative_tokens": block_size,
            },
        }
    return arguments


def options_of(vllm_config: Any) -> TargetOptions:
    """Read the options out of a VllmConfig; defaults where there are none.

    Raises:
        ConfigError: naming every offending field.
    """
    additional = vllm_config.additional_config
    raw = additional.get("dspark", {}) if isinstance(additional, dict) else {}
    try:
        return TargetOptions.model_validate(raw)
    except ValidationError as error:
        lines = [
            f"additional_config.dspark.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()
        ]
        raise ConfigError("invalid engine options:\n  " + "\n  ".join(lines)) from None
