"""Logits processors that work at every slot of a speculative batch.

vLLM refuses logit_bias and min_p together with speculation and does not load their processors. The server
therefore carries both in ``sampling_params.extra_args`` (client values under these keys are dropped there),
and the runner installs the processors of this module, which are vLLM's own behind another reader.

A slot is one verified position: a request with n drafts owns n + 1 consecutive rows of the logits.
"""

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)

logger = logging.getLogger(__name__)

LOGIT_BIAS_KEY = "dspark_logit_bias"
MIN_P_KEY = "dspark_min_p"


def carried_parameters(extra_args: dict[str, Any] | None, vocab_size: int) -> SimpleNamespace:
    """Read logit_bias and min_p out of a request's extra_args.

    Args:
        extra_args: ``{"dspark_logit_bias": [id, bias, id, bias, ...], "dspark_min_p": 0..1}``; both optional.
            The list is flat because vllm_xargs carries only flat lists.
        vocab_size: ids must be below it.

    Returns:
        A namespace with ``logit_bias: dict[int, float] | None`` and ``min_p: float``. A malformed value, which
        the server would have refused, is ignored with a warning: an engine outlives its requests.
    """
    bias, min_p = None, 0.0
    try:
        if flat := (extra_args or {}).get(LOGIT_BIAS_KEY):
            bias = {int(token): float(value) for token, value in zip(flat[::2], flat[1::2], strict=True)}
            if not all(0 <= token < vocab_size for token in bias):
                raise ValueError("token id outside the vocabulary")
        min_p = float((extra_args or {}).get(MIN_P_KEY) or 0.0)
        if not 0.0 <= min_p <= 1.0:
            raise ValueError("min_p outside 0..1")
    except (TypeError, ValueError) as error:
        logger.warning("ignoring malformed %s or %s: %s", LOGIT_BIAS_KEY, MIN_P_KEY, error)
        return SimpleNamespace(logit_bias=None, min_p=0.0)
    return SimpleNamespace(logit_bias=bias, min_p=min_p)


def _with_carried_parameters(batch_update: Any, vocab_size: int) -> Any:
    """A BatchUpdate of vLLM with the carried parameters in the place of each request's own."""
    if not batch_update:
        return batch_update
    added = [
        (row, carried_parameters(params.extra_args, vocab_size), prompt, output)
        for row, params, prompt, output in batch_update.added
    ]
    return replace(batch_update, added=added)


class SlotProcessor(Protocol):
    """A logits processor that also knows several rows a request."""

    def apply_slots(self, logits: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Process logits [sum(counts), V] of which request i owns counts[i] consecutive rows."""


class CarriedLogitBias(LogitBiasLogitsProcessor):
    """logit_bias from extra_args."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        super().__init__(vllm_config, device, is_pin_memory)
        self._vocab_size = vllm_config.model_config.get_vocab_size()

    def update_state(self, batch_update: Any) -> None:
        """Follow the batch."""
        super().update_state(_with_carried_parameters(batch_update, self._vocab_size))

    def apply_slots(self, logits: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Add each request's biases to all of its rows."""
        first = 0
        for request, count in enumerate(counts):
            if bias := self.biases.get(request):
                tokens = torch.tensor(list(bias), device=logits.device)
                values = torch.tensor(list(bias.values()), dtype=torch.float32, device=logits.device)
                logits[first : first + count, tokens] += values
            first += count
        return logits


class CarriedMinP(MinPLogitsProcessor):
    """min_p from extra_args."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        super().__init__(vllm_config, device, is_pin_memory)
        self._vocab_size = vllm_config.model_config.get_vocab_size()

    def update_state(self, batch_update: Any) -> None:
        """Follow the batch."""
        super().update_state(_with_carried_parameters(batch_update, self._vocab_size))

    def apply_slots(self, logits: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Apply with every request's min_p repeated over its rows."""
        if not self.min_p_count:
            return logits
        per_request = self.min_p
        self.min_p = per_request.repeat_interleave(torch.tensor(counts, device=logits.device), dim=0)
        try:
            return self.apply(logits)
        finally:
            self.min_p = per_request


class _OverSlots:
    """A per-request processor bound to this step's rows, in the shape that vLLM's sampler calls."""

    def __init__(self, processor: Any, counts: list[int]):
        self._processor, self._counts = processor, counts

    def is_argmax_invariant(self) -> bool:
        return self._processor.is_argmax_invariant()

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if isinstance(self._processor, MinTokensLogitsProcessor):
            # counts include the bonus row, so "draft positions" here are all slots of a request
            return self._processor.apply_with_spec_decode(logits, self._counts)
        return self._processor.apply_slots(logits, self._counts)


def install_carried_processors(logitsprocs: LogitsProcessors, vllm_config: Any, device: torch.device) -> None:
    """Add the carried processors to a runner's, with or without speculation."""
    logitsprocs.non_argmax_invariant.append(CarriedLogitBias(vllm_config, device, False))
    logitsprocs.argmax_invariant.append(CarriedMinP(vllm_config, device, False))


def over_slots(logitsprocs: LogitsProcessors, counts: list[int]) -> LogitsProcessors:
    """The same processors, in the same order, for a batch in which request i owns counts[i] rows."""
    return LogitsProcessors(_OverSlots(processor, counts) for processor in logitsprocs.all)
