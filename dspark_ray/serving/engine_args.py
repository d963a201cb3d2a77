"""From one model's configuration to what Ray Serve LLM and vLLM are told. No engine starts here."""

from pathlib import Path
from typing import Any

from ray.serve.llm import LLMConfig

from dspark_ray.config import AppConfig, ModelConfig, RoleConfig
from dspark_ray.hardware import cpu_computes_bf16, openmp_env
from dspark_ray.serving.names import LEAST_CPUS
from dspark_ray.serving.speculation import drafts_in_shim, speculation_arguments
from dspark_ray.sources import resolve_source

LOCAL_MODEL = "dspark_ray.serving.engine.LocalModel"
HEALTH_CHECK_PERIOD_S = 5.0
# Serve replaces a replica after three failed checks; its own 30 s would leave a hung one there for two minutes.
HEALTH_CHECK_TIMEOUT_S = 10.0


def llm_config(model: ModelConfig, role: RoleConfig, config: AppConfig, *, disaggregated: bool) -> LLMConfig:
    """What a replica of one role needs to start its engine.

    Args:
        model: the model the replica serves.
        role: ``model.prefill`` or ``model.verifier``.
        config: of the application.
        disaggregated: whether KV is exchanged between prefill and verifier engines.

    Raises:
        ConfigError: the target's source is not there.
    """
    on_cpu = role.gpus == 0
    source = resolve_source(model.target.source, f"model {model.id}: target.source")
    return LLMConfig(
        model_loading_config={"model_id": model.id, "model_source": source},
        accelerator_type=None if on_cpu else role.accelerator_type,
        placement_group_config={"bundles": placement_bundles(model, role), "strategy": "PACK"},
        runtime_env={"env_vars": replica_env(model, role, source)},
        deployment_config=deployment_options(model, role),
        engine_kwargs=engine_kwargs(
            model,
            on_cpu=on_cpu,
            disaggregated=disaggregated,
            max_output_tokens=config.security.max_output_tokens,
        )
        | speculation_arguments(model, config, prefill=role is model.prefill, on_cpu=on_cpu),
        log_engine_metrics=True,
        **({"callback_config": {"callback_class": LOCAL_MODEL}} if Path(source).is_absolute() else {}),
    )


def engine_kwargs(
    model: ModelConfig, *, on_cpu: bool, disaggregated: bool, max_output_tokens: int | None
) -> dict[str, Any]:
    """The AsyncEngineArgs of one engine, but for its drafter.

    Both sides of a KV transfer get the same of these: NIXL compares them before it connects two engines.

    Args:
        model: the model the engine runs.
        on_cpu: whether it runs without a GPU.
        disaggregated: whether KV is exchanged between prefill and verifier engines.
        max_output_tokens: longest answer, also of requests that name no limit; no bound when None.
    """
    target = model.target
    kwargs: dict[str, Any] = {
        "dtype": computation_dtype(model),
        "max_num_seqs": target.max_num_seqs,
        "tensor_parallel_size": target.tensor_parallel_size,
        "pipeline_parallel_size": target.pipeline_parallel_size,
        # A cancelled client must be seen in the engine's own counters, so they are never switched off.
        "disable_log_stats": False,
    }
    if target.data_parallel_size > 1:
        kwargs["data_parallel_size"] = target.data_parallel_size
    if target.max_model_len_tokens is not None:
        kwargs["max_model_len"] = target.max_model_len_tokens
    if on_cpu:
        kwargs |= {
            "enforce_eager": True,
            "kv_cache_memory_bytes": int(target.kv_cache_gib * 2**30),
        }
    if disaggregated:
        kwargs["kv_transfer_config"] = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu" if on_cpu else "cuda",
            "kv_load_failure_policy": "recompute",
        }
    kwargs |= target.engine
    if max_output_tokens is not None:
        generation = dict(kwargs.get("override_generation_config") or {})
        own = generation.get("max_new_tokens") or max_output_tokens
        # vLLM cuts every answer to this, after the room that the prompt leaves.
        generation["max_new_tokens"] = min(own, max_output_tokens)
        kwargs["override_generation_config"] = generation
    return kwargs


def computation_dtype(model: ModelConfig) -> str:
    """What the engines of a model compute in.

    The same in all of them, whatever node each is on, since they exchange KV: an all-CPU model's `auto` is decided
    here, where the application is built.
    """
    on_cpu = model.verifier.gpus == 0 and model.prefill.gpus == 0
    slow = model.target.dtype == "auto" and on_cpu and not cpu_computes_bf16()
    return "float32" if slow else model.target.dtype


def placement_bundles(model: ModelConfig, role: RoleConfig) -> list[dict[str, float]]:
    """One bundle per engine rank; together they are what the role says one replica reserves.

    Always explicit: without bundles Ray Serve LLM takes every model for one on GPUs.
    """
    ranks = model.target.tensor_parallel_size * model.target.pipeline_parallel_size
    bundle = {"CPU": max(role.cpus / ranks, LEAST_CPUS)}
    if role.gpus:
        bundle["GPU"] = role.gpus / ranks
    bundle |= {name: amount / ranks for name, amount in role.resources.items()}
    return [dict(bundle) for _ in range(ranks)]


def deployment_options(model: ModelConfig, role: RoleConfig) -> dict[str, Any]:
    """Ray Serve's options of one role. All bounds are set: those of Ray Serve LLM never shed load."""
    return {
        **scaling_options(role, target_ongoing_requests=model.target.max_num_seqs),
        "max_ongoing_requests": role.max_ongoing_requests,
        "max_queued_requests": role.max_queued_requests,
        "user_config": {},  # given back when a file no longer sets one
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        "graceful_shutdown_timeout_s": role.graceful_shutdown_timeout_s,
        # The placement group's bundles already count what the replica takes.
        "ray_actor_options": {"num_cpus": 0},
    }


def scaling_options(role: RoleConfig, *, target_ongoing_requests: float) -> dict[str, Any]:
    """``num_replicas`` or ``autoscaling_config`` of a deployment, whichever the role asks for."""
    bounds = role.autoscaling
    if bounds is None:
        return {"num_replicas": role.replicas}
    initial = bounds.min_replicas if bounds.initial_replicas is None else bounds.initial_replicas
    return {
        "autoscaling_config": {
            "min_replicas": bounds.min_replicas,
            "initial_replicas": initial,
            "max_replicas": bounds.max_replicas,
            "upscale_delay_s": bounds.upscale_delay_s,
            "downscale_delay_s": bounds.downscale_delay_s,
            "target_ongoing_requests": target_ongoing_requests,
        }
    }


def replica_env(model: ModelConfig, role: RoleConfig, source: str) -> dict[str, str]:
    """Environment of a replica and of the engine processes below it; the role's own entries win."""
    env: dict[str, str] = {}
    if Path(source).is_absolute():
        env["HF_HUB_OFFLINE"] = "1"
    if role.gpus == 0:
        env |= {
            "VLLM_CPU_OMP_THREADS_BIND": core_binding(role.cpu_cores, model.target.tensor_parallel_size),
            **openmp_env(),
        }
    elif drafts_in_shim(model):
        env["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the runner that our worker extends
    return env | role.env


def core_binding(cpu_cores: str | None, ranks: int) -> str:
    """Thread binding as vLLM reads it: the cores split evenly over the ranks, in order.

    vLLM's own ``auto`` binds every engine of a machine to the same cores, so unset means unbound.
    """
    if cpu_cores is None:
        return "nobind"
    cores: list[int] = []
    for part in cpu_cores.split(","):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    each = max(1, len(cores) // ranks)
    shares = [cores[rank * each : (rank + 1) * each] or cores for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)
