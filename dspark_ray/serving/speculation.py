"""What a model's drafter means for its engines: which worker, which options, which request parameters."""

from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from dspark_ray.config import AppConfig, ModelConfig
from dspark_ray.drafter.checkpoint import load_draft_config
from dspark_ray.serving.model_folders import checkpoint_folder, target_folder
from dspark_ray.sources import resolve_source
from dspark_ray.target.options import engine_arguments, options_of, target_options
from dspark_ray.target.slot_processors import LOGIT_BIAS_KEY, MIN_P_KEY


def drafts_in_shim(model: ModelConfig) -> bool:
    """Whether our own worker drafts and verifies, as opposed to vLLM's method or plain decoding."""
    return model.drafter.placement in ("remote", "colocated")


def speculation_arguments(
    model: ModelConfig, config: AppConfig, *, prefill: bool, on_cpu: bool
) -> dict[str, Any]:
    """The AsyncEngineArgs that one engine of the model needs for its drafter.

    Args:
        model: whose engine.
        config: of the application.
        prefill: whether it is a prefill engine: it keeps prompt features and drafts nothing.
        on_cpu: where it runs.

    Raises:
        ConfigError: the drafter is not there or cannot be used.
    """
    placement = model.drafter.placement
    if placement == "native":
        # The same on both sides, or their KV layouts would differ.
        return {"speculative_config": _native_speculation(model)}
    if placement == "none" and not on_cpu:
        return {}
    options = target_options(model, prefills=prefill, secret_env=config.security.secret_env)
    drafts = 0 if placement == "none" else block_size(model)
    return engine_arguments(options, drafts, gpu=not on_cpu)


def block_size(model: ModelConfig) -> int:
    """γ, drafts a round: the configured number, else the checkpoint's."""
    if model.drafter.block_size is not None:
        return model.drafter.block_size
    return load_draft_config(checkpoint_folder(model), target_folder(model)).num_draft_tokens


def _native_speculation(model: ModelConfig) -> dict[str, Any]:
    source = resolve_source(model.drafter.source or "", f"model {model.id}: drafter.source")
    config: dict[str, Any] = {"method": "dspark", "model": source}
    if model.drafter.block_size is not None:
        config["num_speculative_tokens"] = model.drafter.block_size
    return config


def carries_refused_parameters(config: VllmConfig) -> bool:
    """Whether the engine's worker applies at every slot what vLLM refuses under speculation.

    vLLM's own rejection sampler, of `exactness: ratio` and `placement: native`, would leave it out of the drafts.
    """
    options = options_of(config)
    return config.speculative_config is not None and options.verifies and options.exactness == "coupled"


def carry_refused_parameters(params: SamplingParams, vocab_size: int) -> None:
    """Move what vLLM refuses under speculation to where our worker reads it, for every slot alike.

    Raises:
        VLLMValidationError: a bias for a token that there is not, as vLLM itself says where it sees the bias.
    """
    if outside := [token for token in params.logit_bias or {} if not 0 <= token < vocab_size]:
        raise VLLMValidationError(
            f"logit_bias has token ids outside the vocabulary of {vocab_size}: {outside[:8]}",
            parameter="logit_bias",
            value=outside,
        )
    extra = params.extra_args or {}
    if params.logit_bias:
        extra[LOGIT_BIAS_KEY] = [number for pair in params.logit_bias.items() for number in pair]
        params.logit_bias = None
    if params.min_p:
        extra[MIN_P_KEY] = params.min_p
        params.min_p = 0.0
    params.extra_args = extra or None
