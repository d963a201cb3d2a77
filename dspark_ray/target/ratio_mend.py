"""vLLM 0.29's per-token sampling parameters on the CPU, mended.

`rejection_sampler.expand_batch_to_tokens` launches a CPU kernel that writes into a copy, so temperature, top-k
and top-p of every draft row are uninitialised memory. Only vLLM's own rejection sampler calls it (exactness
ratio, and vLLM's own methods such as ngram under it).
"""

import torch
import vllm.v1.sample.rejection_sampler as vllm_rejection_sampler


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeat each request's value over its draft rows.

    Args:
        x: [B], one value a request.
        cu_num_tokens: [B], cumulative draft counts.
        num_tokens: their total.
        replace_from: value to exchange, if it occurs,
        replace_to: for this one.

    Returns:
        [num_tokens], dtype of x.
    """
    counts = torch.diff(cu_num_tokens.to(torch.int64), prepend=cu_num_tokens.new_zeros(1, dtype=torch.int64))
    expanded = x.repeat_interleave(counts, output_size=num_tokens)
    return torch.where(expanded == replace_from, torch.full_like(expanded, replace_to), expanded)


def mend_cpu_expansion() -> None:
    """Replace vLLM's function by ours, for the life of this worker process."""
    vllm_rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
