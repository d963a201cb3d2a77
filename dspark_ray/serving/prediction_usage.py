"""Accepted and rejected drafts of each request, in the ``usage`` of its answer as OpenAI names them.

vLLM counts them for each sequence of a request, but shows them only when there is one, and not in ``usage``.
"""

import contextvars
import json
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

_current: contextvars.ContextVar["PredictionTally | None"] = contextvars.ContextVar("tally", default=None)


class SequenceState(Protocol):
    """What vLLM's output processor knows of one sequence; the engine brings it up to date with every output."""

    spec_decode_metrics: RequestSpecDecodeMetrics | None


def watch(sequence: SequenceState) -> None:
    """Count a sequence for the API request in whose context this is called.

    Its state, not its outputs: those that a client is slow to take are merged, and their counts lost.
    """
    tally = _current.get()
    if tally is not None:
        tally.watch(sequence)


class PredictionTally:
    """Drafts of one API request: all of its prompts and all of their n sequences."""

    def __init__(self) -> None:
        """Nothing to count."""
        self._sequences: list[SequenceState] = []

    def watch(self, sequence: SequenceState) -> None:
        """Count this one, too."""
        self._sequences.append(sequence)

    async def filled_in(self, answer: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
        """An engine's answer with the drafts in its usage. Closes it.

        Args:
            answer: one response object, or strings of whole server-sent events.
        """
        _current.set(self)  # before the first step of the answer, which starts all the work for it
        try:
            async for part in answer:
                yield self._fill(part)
        finally:
            await answer.aclose()

    def _fill(self, part: Any) -> Any:
        if all(sequence.spec_decode_metrics is None for sequence in self._sequences):
            return part
        if isinstance(part, str):
            return "\n".join(self._fill_line(line) for line in part.split("\n"))
        usage = getattr(part, "usage", None)
        if usage is not None:
            details = usage.completion_tokens_details or CompletionTokenUsageInfo()
            counts = self._counts(usage.completion_tokens or 0)
            usage.completion_tokens_details = details.model_copy(update=counts)
        return part

    def _fill_line(self, line: str) -> str:
        """The line with counts, if it is the event that closes a stream with the usage of all of it."""
        if not line.startswith("data: {") or '"usage":{' not in line:
            return line
        event = json.loads(line.removeprefix("data: "))
        if event["choices"]:
            return line  # usage so far, on request
        details = event["usage"].get("completion_tokens_details") or {}
        event["usage"]["completion_tokens_details"] = details | self._counts(
            event["usage"]["completion_tokens"]
        )
        return f"data: {json.dumps(event, separators=(',', ':'))}"

    def _counts(self, emitted: int) -> dict[str, int]:
        verified = accepted = 0
        for sequence in self._sequences:
            if (metrics := sequence.spec_decode_metrics) is not None:
                verified += metrics.num_draft_tokens
                accepted += sum(count * rounds for count, rounds in enumerate(metrics.histogram))
        # A stop in mid-block cuts accepted drafts off: they are no part of the answer, as rejected ones are not.
        accepted = min(accepted, emitted)
        return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": verified - accepted}
