"""From verified tokens to what the client gets: stop tokens, stop strings, budgets and the context's end.

A block is cut exactly where decoding one token at a time would have ended.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Committed:
    """What one round adds to the answer. `len(token_ids)` is what usage counts."""

    token_ids: list[int]
    """Emitted tokens; a stop token, or the one that completes a stop string, is the last of them."""
    logprobs: list[float]
    """One per emitted token, or empty when none were asked for."""
    text: str
    """Text that can be streamed now, without the stop string and what follows it."""
    held_text: str
    """Text that may turn out to begin a stop string; hand it to the next round."""
    finish_reason: FinishReason | None
    """Set when the answer ends here."""


def verify_limit(max_model_len: int, anchor_position: int, remaining_tokens: int | None = None) -> int:
    """The most drafts worth verifying.

    Args:
        max_model_len: positions that the target has, 0..max_model_len-1.
        anchor_position: s; draft k would stand at s+k.
        remaining_tokens: tokens that the request may still emit; a round with ℓ drafts emits up to ℓ+1.

    Returns:
        Largest ℓ with s+ℓ inside the context, at least 0.
    """
    limit = max_model_len - anchor_position - 1
    if remaining_tokens is not None:
        limit = min(limit, remaining_tokens - 1)
    return max(limit, 0)


def commit(
    token_ids: Sequence[int],
    *,
    stop_token_ids: Collection[int],
    remaining_tokens: int,
    pieces: Sequence[str] = (),
    logprobs: Sequence[float] = (),
    stop_strings: Sequence[str] = (),
    held_text: str = "",
) -> Committed:
    """Cut a round's tokens where the answer ends. Token ids, logprobs and text are cut together.

    Stop is looked for token by token and before the budget, so a stop token that is the last allowed one ends
    the answer with reason stop.

    Args:
        token_ids: accepted drafts and the token after them.
        stop_token_ids: EOS and the request's stop_token_ids. The stop token is emitted, nothing after it; it
            adds no text.
        remaining_tokens: tokens that the answer may still have, at least 1.
        pieces: text that each token adds; empty for a caller that has no text.
        logprobs: one per token, or empty.
        stop_strings: the request's stop strings; the answer's text ends before the first of them.
        held_text: what the previous round held back.
    """
    text = held_text
    finish_reason: FinishReason | None = None
    count = 0
    for token in token_ids:
        count += 1
        if token in stop_token_ids:
            finish_reason = "stop"
            break
        text += pieces[count - 1] if pieces else ""
        if (end := _first_stop(text, stop_strings)) is not None:
            text = text[:end]
            finish_reason = "stop"
            break
        if count == remaining_tokens:
            finish_reason = "length"
            break
    held = 0 if finish_reason else _held_back_len(text, stop_strings)
    ready = len(text) - held
    return Committed(
        list(token_ids[:count]), list(logprobs[:count]), text[:ready], text[ready:], finish_reason
    )


def _held_back_len(text: str, stop_strings: Sequence[str]) -> int:
    """Length of the longest end of `text` with which a stop string begins."""
    longest = max((len(stop) for stop in stop_strings), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stop_strings):
            return length
    return 0


def _first_stop(text: str, stop_strings: Sequence[str]) -> int | None:
    return min((at for stop in stop_strings if (at := text.find(stop)) >= 0), default=None)
