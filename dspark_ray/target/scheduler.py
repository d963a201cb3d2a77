"""vLLM's engine scheduler, handing out a verified block token by token.

``scheduler_cls="dspark_ray.target.scheduler.DSparkScheduler"``. vLLM's output processor looks for stop strings
once an output and then keeps all of the output's token ids and logprobs, so a stop string in the middle of a
verified block leaves ids and logprobs behind the cut text. With one token an output it does what it does
without speculation: text, ids and logprobs end together, and what follows is dropped.
"""

from typing import Any

from msgspec.structs import replace
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

# What belongs to the block's first token, and what to its last.
_FIRST_ONLY = {
    "new_prompt_logprobs_tensors": None, "events": None, "prefill_stats": None, "routed_experts": None,
}  # fmt: skip
_LAST_ONLY = {
    "finish_reason": None, "stop_reason": None, "kv_transfer_params": None, "ec_transfer_params": None,
}  # fmt: skip


def one_token_each(output: EngineCoreOutput) -> list[EngineCoreOutput]:
    """Split an output of k tokens into k outputs that mean the same in sequence."""
    last = len(output.new_token_ids) - 1
    if last < 1:
        return [output]
    parts = []
    for position, token in enumerate(output.new_token_ids):
        logprobs = output.new_logprobs
        changes: dict[str, Any] = {
            "new_token_ids": [token],
            "new_logprobs": None if logprobs is None else logprobs.slice_request(position, 1),
        }
        if position > 0:
            changes |= _FIRST_ONLY
        if position < last:
            changes |= _LAST_ONLY
        parts.append(replace(output, **changes))
    return parts


class DSparkScheduler(Scheduler):
    """vLLM's scheduler with one token an output, acceptance counts on every output, and no invented drafts."""

    def __init__(self, *args: Any, **kwargs: Any):
        """Keep vLLM from padding a request that comes prefilled with γ placeholders.

        That serves CUDA graphs of one length for all; our lengths differ by request. The placeholders would be
        verified, and counted as rejected. Nothing is padded where the number of drafts depends on the batch size,
        so it does, formally.
        """
        super().__init__(*args, **kwargs)
        self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.scheduler_config.max_num_seqs + 1)

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        """Split blocks; a request that ends at a stop string keeps its acceptance counts, too."""
        by_client = super().update_from_output(*args, **kwargs)
        for outputs in by_client.values():
            for output in outputs.outputs:
                request = self.requests.get(output.request_id)
                if request is not None and output.spec_decode_metrics is None:
                    output.spec_decode_metrics = request.spec_decode_metrics
            outputs.outputs = [part for output in outputs.outputs for part in one_token_each(output)]
        return by_client
