"""Every vLLM internal that the shim relies on, in one place.

vLLM's worker and runner are extended by subclassing, and their internals change between minor versions. The
worker refuses to start on another version than the one named here, and `broken_promises` says which internal
changed, so that an upgrade begins with a list instead of with wrong text.
"""

import importlib
import inspect
from collections.abc import Iterator
from typing import NamedTuple

from dspark_ray.errors import ConfigError

VLLM_SERIES = "0.29."


class Promise(NamedTuple):
    """One internal: where it is and, for a callable, the parameters it must take."""

    module: str
    attribute: str
    parameters: tuple[str, ...] | None = None
    why: str = ""


_RUNNER = "vllm.v1.worker.gpu_model_runner"
PROMISES = (
    Promise("vllm.v1.worker.cpu_worker", "CPUWorker.init_device", ("self",), "builds the runner"),
    Promise("vllm.v1.worker.cpu_worker", "CPUModelRunner", None, "the name init_device builds"),
    Promise("vllm.v1.worker.gpu_worker", "Worker.init_device", ("self",), "builds the runner"),
    Promise(
        "vllm.v1.worker.gpu_worker",
        "Worker.initialize_from_config",
        ("self", "kv_cache_config"),
        "NixlConnector moves the thread to another core",
    ),
    Promise(
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker",
        "nixl_agent_config",
        None,
        "NIXL's progress thread spins on the CPU",
    ),
    Promise("vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model", ("self",), "time of the step profile"),
    Promise(_RUNNER, "GPUModelRunner.__init__", ("self", "vllm_config", "device"), "subclassed"),
    Promise(_RUNNER, "GPUModelRunner.load_model", ("self", "load_dummy_weights"), "the drafter is loaded after it"),
    Promise(_RUNNER, "GPUModelRunner._update_states", ("self", "scheduler_output"), "makes generators"),
    Promise(
        "vllm.v1.engine.async_llm",
        "AsyncLLM._add_request",
        ("self", "request", "prompt", "parent_req", "index", "queue"),
        "answers that another engine began",
    ),
    Promise(_RUNNER, "GPUModelRunner._sample", ("self", "logits", "spec_decode_metadata"), "generators are kept"),
    Promise(
        _RUNNER,
        "GPUModelRunner._bookkeeping_sync",
        ("self", "scheduler_output", "sampler_output", "logits", "hidden_states", "num_scheduled_tokens"),
        "rewinds generators by a CUDA offset",
    ),
    Promise(
        _RUNNER,
        "GPUModelRunner.propose_draft_token_ids",
        (
            "self", "scheduler_output", "sampled_token_ids", "sampling_metadata", "hidden_states",
            "sample_hidden_states", "aux_hidden_states", "spec_decode_metadata", "common_attn_metadata",
            "slot_mappings",
        ),
        "the hook that drafts",
    ),
    Promise(_RUNNER, "GPUModelRunner._input_fits_in_drafter", ("self", "common_attn_metadata"), "trimmed per request"),
    Promise(_RUNNER, "GPUModelRunner._get_eagle3_aux_layers_from_config", ("self",), "names the tapped layers"),
    Promise(_RUNNER, "GPUModelRunner.execute_model", ("self", "scheduler_output", "intermediate_tensors"), "clock"),
    Promise(_RUNNER, "GPUModelRunner._dummy_run", ("self", "num_tokens"), "step profile"),
    Promise("vllm.v1.sample.sampler", "Sampler.forward", ("self", "logits", "sampling_metadata"), "every slot's draw"),
    Promise(
        "vllm.v1.sample.rejection_sampler",
        "RejectionSampler.forward",
        ("self", "metadata", "draft_probs", "logits", "sampling_metadata"),
        "subclassed",
    ),
    Promise(
        "vllm.v1.sample.rejection_sampler",
        "RejectionSampler.parse_output",
        ("output_token_ids", "vocab_size", "discard_req_indices", "logprobs_tensors"),
        "reads our padded rows",
    ),
    Promise(
        "vllm.v1.sample.rejection_sampler",
        "expand_batch_to_tokens",
        ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
        "mended on the CPU",
    ),
    Promise(
        "vllm.v1.sample.logits_processor.builtin",
        "MinTokensLogitsProcessor.apply_with_spec_decode",
        ("self", "logits", "num_draft_tokens"),
        "min_tokens at every slot",
    ),
    Promise("vllm.v1.sample.logits_processor.builtin", "LogitBiasLogitsProcessor", None, "subclassed"),
    Promise("vllm.v1.sample.logits_processor.builtin", "MinPLogitsProcessor", None, "subclassed"),
)  # fmt: skip
SAMPLING_METADATA_FIELDS = frozenset(
    {
        "temperature", "all_greedy", "all_random", "top_p", "top_k", "generators", "max_num_logprobs",
        "no_penalties", "prompt_token_ids", "frequency_penalties", "presence_penalties", "repetition_penalties",
        "output_token_ids", "allowed_token_ids_mask", "bad_words_token_ids", "logitsprocs", "logprob_token_ids",
        "spec_token_ids", "thinking_budget_state_holder",
    }
)  # fmt: skip


def broken_promises(promises: tuple[Promise, ...] = PROMISES) -> Iterator[str]:
    """One readable line for every internal that is gone or takes other parameters than ours expect."""
    for promise in promises:
        name = f"{promise.module}:{promise.attribute}"
        try:
            found = importlib.import_module(promise.module)
            for part in promise.attribute.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            yield f"{name} is gone (used because: {promise.why})"
            continue
        if promise.parameters is None:
            continue
        names = list(inspect.signature(found).parameters)
        missing = [parameter for parameter in promise.parameters if parameter not in names]
        if missing:
            gone, takes = ", ".join(missing), ", ".join(names)
            yield f"{name} no longer takes {gone} (it takes {takes}; used because: {promise.why})"


def check_vllm_version() -> None:
    """Refuse another vLLM series than the one this shim was written against.

    Raises:
        ConfigError: naming both versions.
    """
    import vllm  # the check itself must be importable without an engine

    if not vllm.__version__.startswith(VLLM_SERIES):
        raise ConfigError(
            f"vllm {vllm.__version__}: dspark_ray.target extends vLLM {VLLM_SERIES}x by subclassing its worker; "
            "install that version, or run the contract test and adapt dspark_ray/target"
        )
