"""Builds the shim's parts out of an engine's configuration, and refuses what cannot work before it serves."""

import os
import random
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dspark_ray.decoding.calibration import CalibrationTable
from dspark_ray.decoding.prefix_scheduler import check_lossless
from dspark_ray.drafter.checkpoint import check_fits_target, load_draft_config, load_drafter, load_projection
from dspark_ray.drafter.fingerprint import fingerprint
from dspark_ray.drafter.model import DraftConfig, FeatureProjection
from dspark_ray.drafter.runner import DraftRunner
from dspark_ray.errors import CheckpointError, ConfigError
from dspark_ray.protocol import DrafterRoute
from dspark_ray.target.context import RequestContexts
from dspark_ray.target.draft_loop import DraftLoop
from dspark_ray.target.drafter_client import ColocatedDrafter, DrafterClient
from dspark_ray.target.handoff import HandoffFetcher, HandoffServer, HandoffStore
from dspark_ray.target.options import TargetOptions
from dspark_ray.target.prefix_features import PrefixFeatures
from dspark_ray.target.remote_drafter import RemoteDrafters
from dspark_ray.target.stats import ShimStats
from dspark_ray.target.step_profile import StepProfile
from dspark_ray.target.verify import VerifyPlanner

MIB = 1 << 20


@dataclass(frozen=True)
class Blueprint:
    """What is known before the model is loaded."""

    options: TargetOptions
    draft: DraftConfig
    checkpoint: Path
    target: Path
    window: int
    block_size: int
    """γ; 0 on a prefill worker."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Tapped layers as vLLM counts them: the residual stream before that layer."""
        return tuple(layer + 1 for layer in self.draft.target_layer_ids)


def plan(options: TargetOptions, vllm_config: Any) -> Blueprint | None:
    """Check the configuration against the checkpoint and the target; None where nothing is tapped.

    Raises:
        ConfigError: two settings that do not go together, by name.
    """
    speculative = vllm_config.speculative_config
    if options.placement == "none":
        return None
    checkpoint = options.checkpoint
    if checkpoint is None or not checkpoint.is_dir():
        raise ConfigError(f"additional_config.dspark.checkpoint: no folder {str(checkpoint)!r} on this node")
    target = Path(vllm_config.model_config.model)
    if not target.is_dir():
        raise ConfigError(f"model {str(target)!r}: a drafter needs its target as a local folder")
    draft = load_draft_config(checkpoint, target)
    check_fits_target(draft, target)
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ConfigError(
            "pipeline_parallel_size > 1 with a drafter: taps use stage-local layers; use tensor parallelism"
        )
    verifies = options.verifies
    if verifies != (speculative is not None):
        raise ConfigError(
            f"additional_config.dspark.placement {options.placement!r} "
            + ("needs a speculative_config" if verifies else "takes no speculative_config")
            + "; build both with dspark_ray.target.options.engine_arguments"
        )
    block_size = speculative.num_speculative_tokens if verifies else 0
    if block_size > draft.num_draft_tokens:
        raise CheckpointError(
            f"num_speculative_tokens {block_size} exceeds the {draft.num_draft_tokens} that {checkpoint.name} "
            "was trained for: set drafter.block_size lower"
        )
    if verifies and vllm_config.reasoning_config is not None:
        raise ConfigError("reasoning_config with a drafter: thinking budgets are not verified at every slot")
    check_lossless(options.exactness, confidence_head_type=draft.confidence_head_type)
    window = min(options.window_tokens, draft.sliding_window or options.window_tokens)
    return Blueprint(options, draft, checkpoint, target, window, block_size)


class Tap:
    """The projection of tapped hidden states to context features, in the target's process."""

    def __init__(self, blueprint: Blueprint, dtype: torch.dtype, device: torch.device):
        self._projection: FeatureProjection = load_projection(
            blueprint.checkpoint, dtype=dtype, device=str(device)
        )

    @torch.inference_mode()
    def features(self, aux_hidden_states: list[torch.Tensor], index: torch.Tensor | None) -> torch.Tensor:
        """Features [k, d] on the CPU.

        Args:
            aux_hidden_states: [T, d] of each tapped layer.
            index: [k] int64, the rows wanted; all when None.
        """
        taps = aux_hidden_states if index is None else [layer[index] for layer in aux_hidden_states]
        return self._projection(torch.cat(taps, dim=-1)).to("cpu", torch.bfloat16)


def _secret(options: TargetOptions) -> str | None:
    return os.environ.get(options.secret_env) or None


def _prefix_features(blueprint: Blueprint, cache_config: Any) -> PrefixFeatures | None:
    capacity = int(blueprint.options.prefix_features_mib * MIB)
    if not cache_config.enable_prefix_caching or not capacity:
        return None
    return PrefixFeatures(cache_config.block_size, blueprint.draft.hidden_size, capacity)


def build_verifier(
    blueprint: Blueprint,
    vllm_config: Any,
    profile: StepProfile,
    device: torch.device,
    stats: ShimStats | None = None,
) -> DraftLoop:
    """The draft loop of a verifying worker.

    Args:
        blueprint: of the engine.
        vllm_config: of the engine.
        profile: what its steps cost.
        device: where it computes.
        stats: counters to go on with.

    Raises:
        ConfigError: the drafter cannot be loaded or does not fit.
    """
    options, draft = blueprint.options, blueprint.draft
    stats = stats or ShimStats()
    mark = fingerprint(blueprint.checkpoint, blueprint.target)
    secret = _secret(options)
    contexts = RequestContexts(
        blueprint.window,
        draft.hidden_size,
        prefix=_prefix_features(blueprint, vllm_config.cache_config),
        stats=stats,
        fetcher=HandoffFetcher(fingerprint=mark, width=draft.hidden_size, secret=secret),
    )
    client: DrafterClient
    if options.placement == "colocated":
        client = _colocated(blueprint, vllm_config, device)
    else:
        rank = vllm_config.parallel_config.data_parallel_rank
        client = RemoteDrafters(
            verifier=f"{socket.gethostname()}-{uuid.uuid4().hex[:12]}-dp{rank}",
            fingerprint=mark,
            width=draft.hidden_size,
            vocab_size=draft.vocab_size,
            secret=secret,
            deadline_ms=options.deadline_ms,
            drafters=[DrafterRoute(d.replica, d.endpoint, 1.0) for d in options.drafters],
        )
    planner = VerifyPlanner(
        options.scheduling,
        tau=options.tau,
        profile=profile,
        exactness=options.exactness,
        block_size=blueprint.block_size,
        calibration=CalibrationTable.load(blueprint.checkpoint),
        rng=random.Random(options.seed),  # noqa: S311 - chooses rounds to measure
    )
    return DraftLoop(
        contexts,
        client,
        planner,
        profile,
        stats,
        exactness=options.exactness,
        refeed_rows=options.refeed_rows_per_step,
    )


def replace_verifier(
    old: DraftLoop, blueprint: Blueprint, vllm_config: Any, device: torch.device
) -> DraftLoop:
    """The draft loop that takes over from another one in mid-flight, with its counters and its requests.

    Features of the old projection mean nothing to the new drafter, so no context is kept.

    Raises:
        ConfigError: the drafter cannot be loaded or does not fit; the old loop goes on then.
    """
    new = build_verifier(blueprint, vllm_config, old.profile, device, old.stats)
    new.client.counters = old.client.counters
    new.contexts.begin_anew(old.contexts.keys)
    old.contexts.close()
    old.client.close()
    return new


def _colocated(blueprint: Blueprint, vllm_config: Any, device: torch.device) -> ColocatedDrafter:
    dtype = vllm_config.model_config.dtype
    model = load_drafter(blueprint.checkpoint, target=blueprint.target, dtype=dtype, device=str(device))
    runner = DraftRunner(
        model,
        cache_bytes=int(blueprint.options.cache_mib * MIB),
        window=blueprint.window,
        max_batch=vllm_config.scheduler_config.max_num_seqs,
        device=device,
        dtype=dtype,
    )
    return ColocatedDrafter(runner)


@dataclass
class PrefillSide:
    """What a prefill worker keeps."""

    contexts: RequestContexts
    offers: HandoffStore
    server: HandoffServer
    stats: ShimStats


def build_prefill(blueprint: Blueprint, vllm_config: Any) -> PrefillSide:
    """The contexts and the hand-off server of a prefill worker."""
    options, width = blueprint.options, blueprint.draft.hidden_size
    stats = ShimStats()
    offers = HandoffStore(int(options.handoff_mib * MIB), options.handoff_lifetime_s)
    contexts = RequestContexts(
        blueprint.window,
        width,
        prefix=_prefix_features(blueprint, vllm_config.cache_config),
        stats=stats,
        offers=offers,
    )
    server = HandoffServer(
        offers,
        bind=options.handoff_bind,
        fingerprint=fingerprint(blueprint.checkpoint, blueprint.target),
        width=width,
        secret=_secret(options),
    )
    return PrefillSide(contexts, offers, server, stats)


def replace_prefill(old: PrefillSide, blueprint: Blueprint, vllm_config: Any) -> PrefillSide:
    """What a prefill worker keeps from now on, under a new endpoint. Prompts in work are not offered."""
    new = build_prefill(blueprint, vllm_config)
    new.contexts.begin_anew(old.contexts.keys)
    old.server.close()
    return new


def profile_engine(run: Callable[[int], None], max_tokens: int, clock: Callable[[], float]) -> StepProfile:
    """Measure the engine's steps at start-up."""
    from dspark_ray.target.step_profile import measure_steps, profile_sizes

    sizes = profile_sizes(max_tokens)
    return StepProfile(sizes, measure_steps(run, sizes, clock))
