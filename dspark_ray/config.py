"""The whole configuration of a deployment, as frozen pydantic models.

A Serve config file names ``dspark_ray.serving.app:build_app`` as its ``import_path``; the ``args`` beside it
are an `AppConfig`. Precedence is defaults < file. Nothing here imports torch, ray or vllm, so a file can be
checked anywhere: ``dspark-ray config show FILE``.
"""

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dspark_ray.errors import ConfigError, ExactnessError

Placement = Literal["remote", "colocated", "native", "none"]
Exactness = Literal["coupled", "ratio", "probabilistic"]
VerifyMode = Literal["fixed_len", "fixed_tau", "tau", "throughput", "tau+throughput"]
Share = Annotated[float, Field(ge=0.0, le=1.0)]

ROLE_SIZER = "dspark_ray.serving.autoscaling:RoleSizer"
"""Import path of the application's autoscaling policy, in a Serve config file."""

# Engine arguments that follow from other fields here. Setting them twice could only disagree.
OWNED_ENGINE_ARGS = frozenset(
    {
        "data_parallel_size", "dtype", "enable_log_requests", "kv_transfer_config", "max_model_len",
        "max_num_seqs", "model", "pipeline_parallel_size", "served_model_name", "speculative_config",
        "tensor_parallel_size", "trust_remote_code", "worker_cls",
    }
)  # fmt: skip


class FrozenModel(BaseModel):
    """Base of every configuration model: immutable, no unknown fields, docstrings are descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class AutoscalingConfig(FrozenModel):
    """Bounds and delays within which the application policy sizes one role."""

    min_replicas: int = Field(default=1, ge=0)
    """Never fewer replicas than this; 0 lets an idle role scale to zero."""
    max_replicas: int = Field(default=1, ge=1)
    """Never more replicas than this."""
    initial_replicas: int | None = Field(default=None, ge=0)
    """Replicas at start-up; min_replicas when unset."""
    upscale_delay_s: float = Field(default=30.0, ge=0)
    """How long more replicas must be wanted before they are added."""
    downscale_delay_s: float = Field(default=600.0, ge=0)
    """How long fewer replicas must be wanted before one is removed."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        initial = self.min_replicas if self.initial_replicas is None else self.initial_replicas
        if not self.min_replicas <= initial <= self.max_replicas:
            raise ValueError("min_replicas <= initial_replicas <= max_replicas must hold")
        return self


class RoleConfig(FrozenModel):
    """How many replicas a role has and what each of them takes from its node."""

    replicas: int = Field(default=1, ge=0)
    """Fixed number of replicas; ignored when autoscaling is set."""
    autoscaling: AutoscalingConfig | None = None
    """Autoscaling bounds; a fixed number of replicas when unset."""
    cpus: float = Field(default=1.0, ge=0)
    """Logical CPUs one replica reserves."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs one replica reserves (per tensor-parallel rank: 1); 0 runs on the CPU."""
    accelerator_type: str | None = None
    """Ray accelerator type that replicas are placed on, for example H100."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Further Ray custom resources of one replica."""
    cpu_cores: str | None = Field(default=None, pattern=r"^\d+(-\d+)?(,\d+(-\d+)?)*$")
    """Cores that an engine's threads are bound to on the CPU platform, such as 0 or 0-3; unbound if unset."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the replica's processes. No secrets: this is printed by config show."""
    max_ongoing_requests: int = Field(default=64, ge=1)
    """Requests one replica works on or holds in its engine's queue at once."""
    max_queued_requests: int = Field(default=256, ge=-1)
    """Requests that wait in Serve per caller before overload is answered with 503; -1 is unbounded."""
    graceful_shutdown_timeout_s: float = Field(default=120.0, ge=0)
    """How long a draining replica may finish its streams."""


class PrefillConfig(RoleConfig):
    """The prefill replicas of one model, and how long a verifier waits for them."""

    replicas: int = Field(default=0, ge=0)
    """Fixed number of replicas; with 0 the verifier prefills itself."""
    queue_wait_s: float = Field(default=1.0, gt=0)
    """How long a prompt waits for a free prefill replica before the verifier prefills it itself."""
    deadline_s: float = Field(default=60.0, gt=0)
    """How long a prefill replica may work on one prompt before the verifier prefills it itself."""


class TargetConfig(FrozenModel):
    """The model that speaks, and how its engine runs."""

    source: str = Field(min_length=1)
    """A local folder, a Hugging Face id, or demo:smollm2."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Computation type; auto follows the checkpoint, but is float32 on CPUs that have no bf16 instructions."""
    max_model_len_tokens: int | None = Field(default=None, ge=16)
    """Longest prompt plus answer; the model's own limit when unset."""
    max_num_seqs: int = Field(default=16, ge=1)
    """Requests in one engine step at most."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share each layer."""
    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Pipeline stages; more than 1 is refused together with a drafter."""
    data_parallel_size: int = Field(default=1, ge=1)
    """Engines a replica group runs; each is its own verifier. More than 1 needs a fixed number of groups."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """KV cache of one CPU engine, in GiB (GPUs: gpu_memory_utilization under engine)."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Further vLLM AsyncEngineArgs by name."""

    @model_validator(mode="after")
    def _engine_is_ours_where_named(self) -> Self:
        owned = sorted(OWNED_ENGINE_ARGS & self.engine.keys())
        if owned:
            raise ValueError(
                f"engine: {', '.join(owned)} follow from other fields of this file; set those instead"
            )
        return self


class DrafterConfig(RoleConfig):
    """The drafter of one model, and its pool of replicas."""

    placement: Placement = "none"
    """remote: a shared pool; colocated: in the verifier's worker; native: vLLM's own DSpark (GPU); none."""
    source: str | None = None
    """Folder or Hugging Face id of the draft checkpoint."""
    block_size: int | None = Field(default=None, ge=1, le=32)
    """Drafted tokens a round, at most the checkpoint's; the checkpoint's when unset."""
    window_tokens: int = Field(default=256, ge=16)
    """Context features kept for each request, on both sides."""
    cache_mib: float = Field(default=256.0, gt=0)
    """Context cache of one drafter replica, in MiB."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of one drafter engine."""
    deadline_ms: float | None = Field(default=None, gt=0)
    """Longest wait for one draft call; follows a running estimate when unset."""
    batch_wait_ms: float = Field(default=0.0, ge=0)
    """How long a drafter waits to batch calls of several verifiers together."""

    @model_validator(mode="after")
    def _source_when_drafting(self) -> Self:
        if self.placement != "none" and self.source is None:
            raise ValueError(f"drafter.source is needed with placement {self.placement!r}")
        return self


class SchedulingConfig(FrozenModel):
    """How many of the drafted tokens are verified (spec section 4)."""

    mode: VerifyMode = "tau+throughput"
    """fixed_len, fixed_tau, tau (threshold from load), throughput (Algorithm 1), or the last two together."""
    fixed_len: int | None = Field(default=None, ge=0)
    """Verify length of mode fixed_len; the whole block when unset."""
    fixed_tau: Share = 0.35
    """Survival threshold of mode fixed_tau."""
    min_verify_len: int = Field(default=0, ge=0)
    """Drafts verified at least, in mode tau only."""
    full_round_share: Share = 0.02
    """Share of rounds verified in full, on which calibration from serving logs is fitted."""


class ModelConfig(FrozenModel):
    """One model behind the API: a target, its drafter, and the size of each role."""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=128)
    """The name clients put in the request's model field."""
    target: TargetConfig
    """The model that speaks."""
    drafter: DrafterConfig = DrafterConfig()
    """Its drafter; plain decoding when unset."""
    exactness: Exactness = "coupled"
    """How drafts are accepted (dspark-spec.md section 3)."""
    scheduling: SchedulingConfig = SchedulingConfig()
    """How long the verified prefix is."""
    prefill: PrefillConfig = PrefillConfig()
    """Prefill replicas; none by default: the verifier prefills itself."""
    verifier: RoleConfig = RoleConfig()
    """Verifier (decode) replicas."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.drafter.placement != "none" and self.target.pipeline_parallel_size > 1:
            raise ValueError(
                "target.pipeline_parallel_size > 1 cannot be combined with a drafter (taps use stage-local "
                "layers): set drafter.placement to none, or use tensor_parallel_size"
            )
        for name, role in (("verifier", self.verifier), ("prefill", self.prefill)):
            if self.target.data_parallel_size > 1 and role.autoscaling is not None:
                raise ValueError(
                    f"{name}.autoscaling cannot be combined with target.data_parallel_size > 1 (Serve starts and "
                    f"stops whole groups, and the application's policy counts replicas): set {name}.replicas"
                )
        if self.drafter.placement == "native" and self.verifier.gpus == 0:
            raise ValueError(
                "drafter.placement native is vLLM's own GPU method: set verifier.gpus, or use remote"
            )
        if self.verifier.autoscaling is None and self.verifier.replicas < 1:
            raise ValueError("verifier.replicas must be at least 1")
        if self.exactness == "probabilistic":
            raise ExactnessError(
                f"model {self.id!r}: exactness 'probabilistic' with drafter.placement "
                f"{self.drafter.placement!r} is not built: use 'coupled' (default) or 'ratio'"
            )
        return self


class ControlConfig(FrozenModel):
    """The cluster scheduler: from load to tau (spec section 4)."""

    policy: Literal["guide", "fixed_tau", "goodput"] = "guide"
    """guide: quadratic in load; goodput: steered by accepted tokens per second; fixed_tau: constant."""
    tau_min: Share = 0.20
    """tau of an idle replica."""
    tau_max: Share = 0.75
    """tau of a saturated replica."""
    fixed_tau: Share = 0.35
    """tau of policy fixed_tau."""
    max_verify_len: int | None = Field(default=None, ge=0)
    """Drafts verified per request and step at most, on every replica; the whole block when unset."""
    queue_weight: Share = 0.6
    """Weight of the queue in the load; with memory_weight it sums to 1."""
    memory_weight: Share = 0.4
    """Weight of KV memory in the load."""
    queue_max_requests: int = Field(default=64, ge=1)
    """Waiting requests at which the queue term saturates."""
    cluster_weight: Share = 0.25
    """Share of the mean load of the model's replicas in a replica's blended load."""
    load_rise_s: float = Field(default=0.2, ge=0)
    """Time constant with which the smoothed load follows a rise."""
    load_fall_s: float = Field(default=2.0, ge=0)
    """Time constant with which the smoothed load follows a fall; at least load_rise_s."""
    load_hysteresis: Share = 0.1
    """Share by which the smoothed load must fall before tau follows it down."""
    goodput_period_s: float = Field(default=3.0, gt=0)
    """Time between two adjustments of policy goodput."""
    goodput_step: Share = 0.05
    """How far policy goodput moves tau at once."""
    goodput_span: Share = 0.2
    """How far policy goodput may leave the guide's tau, either way."""
    drift_limit: Share = 0.15
    """Gap between predicted and observed acceptance from which a drafter counts as out of calibration."""
    tick_interval_s: float = Field(default=0.2, gt=0)
    """Time between decisions of the cluster scheduler."""
    policy_lifetime_s: float = Field(default=3.0, gt=0)
    """How long a replica follows a published policy before it computes tau from its own load."""
    lease_lifetime_s: float = Field(default=1.0, gt=0)
    """How long a silent scheduler keeps the right to rule."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.tau_min > self.tau_max:
            raise ValueError("tau_min <= tau_max must hold")
        if abs(self.queue_weight + self.memory_weight - 1.0) > 1e-6:
            raise ValueError("queue_weight + memory_weight must be 1")
        if self.load_fall_s < self.load_rise_s:
            raise ValueError("load_fall_s >= load_rise_s must hold: tau follows load up faster than down")
        if self.tick_interval_s >= min(self.lease_lifetime_s, self.policy_lifetime_s):
            raise ValueError("tick_interval_s must be below lease_lifetime_s and policy_lifetime_s")
        return self


class AutoscalingTargets(FrozenModel):
    """What the application's autoscaling policy aims at; the ``policy_kwargs`` of a Serve config file."""

    target_ttft_s: float = Field(default=2.0, gt=0)
    """Longest mean time to the first token before prefill and verifiers are added."""
    target_token_latency_s: float = Field(default=0.1, gt=0)
    """Longest mean time per token of a stream; while it holds, raising tau comes before adding a verifier."""
    prefill_requests_per_replica: float = Field(default=2.0, gt=0)
    """Prompts waiting or in work that one prefill replica should have."""
    verifier_seat_share: Share = 0.8
    """Share of max_num_seqs that should be taken."""
    verifier_kv_share: Share = 0.85
    """Share of KV blocks that should be in use at most."""
    drafter_slot_share: Share = 0.8
    """Share of context slots that should be taken at most."""
    drafter_miss_share: Share = 0.05
    """Share of draft calls past their deadline from which a drafter is added."""
    downscale_margin: Share = 0.75
    """A replica goes only when the rest would stay below this share of their targets."""


class TelemetryConfig(FrozenModel):
    """Where replicas report their load, and how often."""

    redis_url_env: str = "DSPARK_REDIS_URL"
    """Environment variable with the Redis URL (redis://, rediss://); without it control is local only."""
    key_prefix: str = Field(default="dspark", min_length=1)
    """Prefix of every key."""
    sample_interval_s: float = Field(default=0.2, gt=0)
    """Time between load samples of one replica."""
    sample_lifetime_s: float = Field(default=5.0, gt=0)
    """Age at which a sample counts as dead."""
    history_samples: int = Field(default=2000, ge=0)
    """Samples kept per model for top and plots."""
    calibration_rounds: int = Field(default=20_000, ge=0)
    """Fully verified rounds kept per model, on which calibration from serving logs is fitted."""
    timeout_s: float = Field(default=1.0, gt=0)
    """Longest wait for Redis in the background; no request ever waits for it."""
    backoff_max_s: float = Field(default=2.0, gt=0)
    """Longest pause between two attempts to reach Redis again."""


class KeyLimits(FrozenModel):
    """How much one API key may ask for, counted in each ingress replica by itself."""

    requests_per_minute: float | None = Field(default=None, gt=0)
    """Sustained rate; unlimited when unset."""
    burst_requests: int = Field(default=20, ge=1)
    """Requests at once after a pause, on top of the sustained rate."""
    concurrent_requests: int | None = Field(default=None, ge=1)
    """Requests and streams under way together; unlimited when unset."""


class SecurityConfig(FrozenModel):
    """Who may ask for what."""

    secret_env: str = "DSPARK_SECRET"  # noqa: S105 - the name of a variable, not a secret
    """Environment variable with the deployment's shared secret between replicas."""
    api_keys_env: str | None = None
    """Environment variable with API keys, comma separated; no keys are asked for without this or the file."""
    api_keys_file: str | None = None
    """YAML file of hashed API keys, each with its own models and limits; read again when it changes."""
    key_limits: KeyLimits = KeyLimits()
    """Limits of keys that name none of their own, and of everybody together where no keys are asked for."""
    max_body_bytes: int = Field(default=1 << 20, ge=1024)
    """Largest request body."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Largest max_tokens of a request, and the longest answer where a request names none; no bound when unset."""
    max_n: int = Field(default=16, ge=1)
    """Largest n of a request."""
    max_prompts: int = Field(default=64, ge=1)
    """Most prompts in one completions request."""
    max_stop_sequences: int = Field(default=16, ge=1)
    """Most stop strings of a request."""
    max_token_rules: int = Field(default=1024, ge=1)
    """Most entries of each of logit_bias, bad_words and stop_token_ids."""


class FailoverConfig(FrozenModel):
    """What becomes of an answer whose verifier dies or hangs."""

    silence_s: float = Field(default=60.0, ge=1)
    """How long a verifier or its engine may give no sign of life before it counts as lost; longer than any
    single engine step takes. An engine that is silent for so long is ended and started anew."""
    wait_s: float = Field(default=300.0, ge=0)
    """How long an interrupted answer waits for another verifier before it ends with an error."""
    takeovers: int = Field(default=2, ge=0)
    """How often one answer may lose its verifier: a request that kills its engine must not kill them all."""


class AppConfig(FrozenModel):
    """The args of a Serve application."""

    models: tuple[ModelConfig, ...] = Field(min_length=1)
    """The models behind the API."""
    ingress: RoleConfig = RoleConfig(max_ongoing_requests=1024)
    """The OpenAI-compatible front."""
    control: ControlConfig = ControlConfig()
    """The cluster scheduler."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Load reports."""
    failover: FailoverConfig = FailoverConfig()
    """Answers that outlive their verifier."""
    security: SecurityConfig = SecurityConfig()
    """Limits and keys."""

    @model_validator(mode="after")
    def _ids_differ(self) -> Self:
        ids = [model.id for model in self.models]
        if len(set(ids)) != len(ids):
            raise ValueError(f"models: ids must differ, got {ids}")
        return self


class LiveConfig(FrozenModel):
    """The ``user_config`` of a deployment in a Serve config file: what running replicas take over, none restarts.

    Whatever is not named here is as the args say.
    """

    control: dict[str, Any] = Field(default_factory=dict)
    """Fields of control, for the ingress (which tells the cluster scheduler) and for verifiers."""
    scheduling: dict[str, Any] = Field(default_factory=dict)
    """Fields of the model's scheduling, for verifiers."""
    drafter_source: str | None = None
    """Another draft checkpoint that taps the same layers, for drafters, verifiers and prefill replicas. Until both
    ends of a pair have it, they decode plainly."""


_Model = TypeVar("_Model", bound=FrozenModel)


def overlaid(base: _Model, changes: dict[str, Any]) -> _Model:
    """A configuration with some fields changed.

    Raises:
        ValidationError: it cannot be.
    """
    return type(base).model_validate(base.model_dump() | changes)


def parse_app_config(args: dict[str, Any]) -> AppConfig:
    """Validate the ``args`` of a Serve application.

    Raises:
        ConfigError: naming every offending field.
    """
    with _fields_named("args"):
        return AppConfig.model_validate(args)


def parse_live_config(user_config: Any, config: AppConfig) -> LiveConfig:
    """Validate the ``user_config`` of a deployment of an application.

    Raises:
        ConfigError: naming every offending field.
    """
    with _fields_named("user_config"):
        live = LiveConfig.model_validate(user_config or {})
    with _fields_named("user_config.control"):
        overlaid(config.control, live.control)
    with _fields_named("user_config.scheduling"):
        overlaid(SchedulingConfig(), live.scheduling)
    return live


@contextmanager
def _fields_named(where: str) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        prefix = "" if where == "args" else f"{where}."
        raise ConfigError(_explain(error, prefix)) from None


def _explain(error: ValidationError, prefix: str) -> str:
    """Every offending field with what is wrong, and for an unknown one the known name that is most like it."""
    faults = error.errors()
    lines = []
    for fault in faults:
        loc, message = fault["loc"], fault["msg"]
        inner = any(len(f["loc"]) > len(loc) and f["loc"][: len(loc)] == loc for f in faults)
        if fault["type"] == "too_short" and inner:
            continue  # an item that is wrong counts as missing, too
        if fault["type"] == "extra_forbidden":
            sections = [s for s in globals().values() if isinstance(s, type) and issubclass(s, FrozenModel)]
            known = {name for section in sections for name in section.model_fields}
            like = difflib.get_close_matches(str(loc[-1]), known, n=1)
            message = "no such field" + (f"; did you mean {like[0]!r}?" if like else "")
        lines.append(f"{prefix}{'.'.join(map(str, loc)) or 'args'}: {message}")
    return "invalid configuration:\n  " + "\n  ".join(lines)


def load_serve_file(path: Path) -> dict[str, AppConfig]:
    """Read a Serve config file and return the configuration of each of our applications by name.

    Raises:
        ConfigError: the file is missing, is not YAML, or names none of our applications.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    applications = document.get("applications") if isinstance(document, dict) else None
    ours = {}
    for app in applications if isinstance(applications, list) else []:
        if isinstance(app, dict) and app.get("import_path") == "dspark_ray.serving.app:build_app":
            try:
                config = parse_app_config(app.get("args") or {})
                _check_sizer(app.get("autoscaling_policy"), config)
                for deployment in app.get("deployments") or []:
                    parse_live_config(deployment.get("user_config"), config)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from None
            ours[str(app.get("name", "default"))] = config
    if not ours:
        raise ConfigError(f"{path}: applications: none has import_path dspark_ray.serving.app:build_app")
    return ours


def _check_sizer(policy: Any, config: AppConfig) -> None:
    """Refuse an ``autoscaling_policy`` whose arguments its class would refuse later, inside Serve's controller.

    Raises:
        ConfigError: naming every offending argument.
    """
    if not isinstance(policy, dict) or policy.get("policy_function") != ROLE_SIZER:
        return
    given = policy.get("policy_kwargs") or {}
    if not isinstance(given, dict):
        raise ConfigError("autoscaling_policy.policy_kwargs: must be a mapping")
    targets = dict(given)
    prefix = targets.pop("key_prefix", TelemetryConfig().key_prefix)
    if prefix != config.telemetry.key_prefix:
        raise ConfigError(
            f"autoscaling_policy.policy_kwargs.key_prefix: {prefix!r} is not args.telemetry.key_prefix "
            f"({config.telemetry.key_prefix!r}): the policy would ask another deployment's scheduler"
        )
    with _fields_named("autoscaling_policy.policy_kwargs"):
        AutoscalingTargets.model_validate(targets)
