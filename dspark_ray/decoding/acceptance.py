"""Which drafts the target accepts, and what it says instead (spec section 3).

Two rules, both lossless. `verify_ratio` is rejection sampling against the distribution the draft was drawn
from. `verify_coupled` emits the target's own draws and accepts the drafts that equal them. Randomness comes
in through `Chance`, so that tests can enumerate every outcome and each use has its own stream.

Symbols: ℓ verify length · A accepted drafts · V vocabulary · s the anchor's position. `position` is always
that of the token being decided.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dspark_ray.decoding.sampling import draw, exponential_noise

_MIN_PROBABILITY = 1e-8


class Chance(Protocol):
    """A source of randomness, keyed by the position that is decided."""

    def accepts(self, probability: float, position: int) -> bool:
        """True with the given probability."""
        ...

    def draws(self, probs: Tensor, position: int) -> int:
        """An index drawn from probs [V]."""
        ...


class SeededChance:
    """Randomness as a function of (seed, stream, position) alone: it does not matter what was drawn before.

    Args:
        seed: the request's seed.
        stream: what the randomness is for. Draft, acceptance, residual and target draws must not share one:
            with common noise the residual would repeat the rejected draft's luck.
    """

    def __init__(self, seed: int, stream: str):
        self._key = f"{seed}/{stream}/".encode()
        self._generator = torch.Generator()

    def accepts(self, probability: float, position: int) -> bool:
        """True with the given probability."""
        return float(torch.rand((), generator=self._at(position), dtype=torch.float64)) < probability

    def draws(self, probs: Tensor, position: int) -> int:
        """An index drawn from probs [V]; the noise is drawn on the CPU, so every device draws alike."""
        noise = exponential_noise(torch.empty(probs.shape), self._at(position))
        return int(draw(probs.float(), noise.to(probs.device)))

    def _at(self, position: int) -> torch.Generator:
        digest = hashlib.blake2b(self._key + str(position).encode(), digest_size=8).digest()
        return self._generator.manual_seed(int.from_bytes(digest, "little") >> 1)


@dataclass(frozen=True)
class Verdict:
    """The outcome of one verification round."""

    accept_len: int
    """A: leading drafts that were accepted."""
    next_token_id: int
    """What follows them: the bonus token, or the replacement of the first rejected draft."""


def accept_probability(target_prob: float, draft_prob: float) -> float:
    """min(1, p(x) / max(q(x), 1e-8))."""
    return min(1.0, target_prob / max(draft_prob, _MIN_PROBABILITY))


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """(p - q)₊ normalised, p itself where next to no mass is left. All [V]."""
    rest = (target_probs - draft_probs).clamp_min(0)
    mass = rest.sum()
    return target_probs if float(mass) <= _MIN_PROBABILITY else rest / mass


def verify_ratio(
    target_probs: Tensor,
    draft_token_ids: Sequence[int],
    draft_probs: Tensor | None,
    anchor_position: int,
    *,
    acceptance: Chance,
    replacement: Chance,
) -> Verdict:
    """Rejection sampling (ratio rule).

    Args:
        target_probs: [ℓ+1, V], row k-1 is p_k: after temperature, filters, penalties and masks.
        draft_token_ids: ℓ drafted target ids.
        draft_probs: [ℓ, V], the q that was really drawn from; None when drafts were an argmax, whose q is
            one-hot (a softmax would be wrong).
        anchor_position: s; draft k is decided at position s+k.
        acceptance: stream of the accept decisions, independent of what drew the drafts.
        replacement: stream of the residual and bonus draws, independent of both.

    Returns:
        A and the token after the accepted drafts.
    """
    for k, token in enumerate(draft_token_ids):
        position = anchor_position + 1 + k
        if draft_probs is None:
            q_row = torch.zeros_like(target_probs[k])
            q_row[token] = 1.0
        else:
            q_row = draft_probs[k]
        if not acceptance.accepts(
            accept_probability(float(target_probs[k, token]), float(q_row[token])), position
        ):
            return Verdict(k, replacement.draws(residual(target_probs[k], q_row), position))
    verified = len(draft_token_ids)
    return Verdict(verified, replacement.draws(target_probs[verified], anchor_position + 1 + verified))


def verify_coupled(
    target_probs: Tensor, draft_token_ids: Sequence[int], anchor_position: int, *, target: Chance
) -> Verdict:
    """Exact match with the target's own draws (coupled rule).

    What is emitted at a position is `target.draws(p, position)` whatever was drafted, so the output is a
    function of the target and its noise alone.

    Args:
        target_probs: [ℓ+1, V], row k-1 is p_k.
        draft_token_ids: ℓ drafted target ids, however they were made.
        anchor_position: s.
        target: stream of the target's draws, keyed by position.

    Returns:
        A and the token after the accepted drafts: the very draw that did not match, never a fresh one.
    """
    for k, token in enumerate(draft_token_ids):
        drawn = target.draws(target_probs[k], anchor_position + 1 + k)
        if drawn != token:
            return Verdict(k, drawn)
    verified = len(draft_token_ids)
    return Verdict(verified, target.draws(target_probs[verified], anchor_position + 1 + verified))


def matching_prefix_len(draft_token_ids: Tensor, target_token_ids: Tensor) -> Tensor:
    """A of many requests under the coupled rule, on any device.

    Args:
        draft_token_ids: [B, γ] int64, padded with -1 after each request's ℓ drafts.
        target_token_ids: [B, ≥γ] int64, the target's own draw at each draft's position.

    Returns:
        [B] int64: the leading drafts that equal the target's draws.
    """
    equal = draft_token_ids == target_token_ids[:, : draft_token_ids.shape[1]]
    return (equal & (draft_token_ids >= 0)).long().cumprod(-1).sum(-1)
