"""Accepted and rejected drafts of each request, in the ``usage`` of its answer as OpenAI names them.

vLLM counts them for each sequence of a request, but shows them only when there is one, and not in ``usage``.
"""

import contextvars
import json
from collections.abc import AsyncGenerator
from typing import Any

from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo
from vllm.outputs import RequestOutput

_current: contextvars.ContextVar["PredictionTally | None"] = contextvars.ContextVar("tally", default=None)


def observe(output: RequestOutput) -> None:
    """Count what the engine says of the finished sequences of the API request in whose context this is called."""
    tally = _current.get()
    if tally is not None:
        tally.observe(output)


class PredictionTally:
    """Drafts of one API request: all of its prompts and all of their n sequences."""

    def __init__(self) -> None:
        """Nothing counted."""
        self._verified = 0
        self._accepted = 0
        self._seen = False

    def observe(self, output: RequestOutput) -> None:
        """Count an output's sequences; only those that have ended carry counts."""
        for sequence in output.outputs:
            if (metrics := sequence.spec_decode_metrics) is not None:
                self._seen = True
                self._verified += metrics.num_draft_tokens
                self._accepted += sum(count * rounds for count, rounds in enumerate(metrics.histogram))

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
        if not self._seen:
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
        # A stop in mid-block cuts accepted drafts off: they are no part of the answer, as rejected ones are not.
        accepted = min(self._accepted, emitted)
        return {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": self._verified - accepted,
        }
