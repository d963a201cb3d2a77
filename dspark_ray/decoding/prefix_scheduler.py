"""How many drafts of each request the target verifies in a step (spec section 4).

Runs in the verifier's worker every step on a few dozen floats, hence plain Python.

Symbols: R requests in the step, each with its own number of drafts · a_k survival, the chance that drafts
1..k are all accepted · ℓ verify length · B tokens in the verify pass, Σ(1+ℓ) plus prefill · SPS(B) steps per
second · Θ expected tokens per second.

Causality: `ℓ_r ≥ k` may only depend on what was known before x_{r,k} was drawn, unless the drafts are an
argmax or verification is coupled. `check_lossless` knows which settings keep to that.
"""

import heapq
import logging
import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Literal

from dspark_ray.config import Exactness, VerifyMode
from dspark_ray.errors import ConfigError, ExactnessError

logger = logging.getLogger(__name__)

# A whole profiled range that costs this little more at its end than at its beginning was not measured right.
_FLAT_BELOW = 1.05

LengthRule = Literal[
    "fixed_len", "survival_threshold", "causal_throughput", "delayed_budget",
    "same_step_optimum", "own_probability", "grammar_on_draft", "skip_after_confidence",
]  # fmt: skip
_CAUSAL_RULES: frozenset[LengthRule] = frozenset(
    {"fixed_len", "survival_threshold", "causal_throughput", "delayed_budget"}
)


@dataclass(frozen=True)
class StepCurve:
    """Profiled cost of a whole step: verify pass, draft and transport together.

    Attributes:
        batch_tokens: B of each measurement, strictly ascending, at least 1.
        step_ms: milliseconds of one step at that B.
    """

    batch_tokens: tuple[int, ...]
    step_ms: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check the points and warn about a flat curve.

        Raises:
            ConfigError: no points, lengths differ, B not ascending, or a time not positive and finite.
        """
        if not self.batch_tokens or len(self.batch_tokens) != len(self.step_ms):
            raise ConfigError("step curve: batch_tokens and step_ms must be equally long and not empty")
        if self.batch_tokens[0] < 1 or any(a >= b for a, b in pairwise(self.batch_tokens)):
            raise ConfigError("step curve: batch_tokens must be strictly ascending from at least 1")
        if not all(math.isfinite(ms) and ms > 0 for ms in self.step_ms):
            raise ConfigError("step curve: step_ms must be positive and finite; profile again")
        if self.is_flat:
            _warn_of_flat_curve()

    @cached_property
    def is_flat(self) -> bool:
        """Whether the curve says that extra tokens cost nothing, which it can only say by mistake."""
        return self.step_ms[-1] < _FLAT_BELOW * self.step_ms[0]

    def milliseconds(self, tokens: int) -> float:
        """Step time at B tokens: linear between measurements, along the last slope (never down) beyond."""
        sizes, times = self.batch_tokens, self.step_ms
        if tokens <= sizes[0]:
            return times[0]
        i = min(bisect_left(sizes, tokens), len(sizes) - 1)
        if i == 0:
            return times[0]
        slope = (times[i] - times[i - 1]) / (sizes[i] - sizes[i - 1])
        if tokens > sizes[-1]:
            return times[-1] + max(slope, 0.0) * (tokens - sizes[-1])
        return times[i - 1] + slope * (tokens - sizes[i - 1])

    def steps_per_second(self, tokens: int) -> float:
        """SPS(B)."""
        return 1000.0 / self.milliseconds(tokens)


@cache
def _warn_of_flat_curve() -> None:
    """Once in a process: curves are built anew from measurements all the time."""
    logger.warning(
        "the step curve is flat and would verify everything, so the tau policy decides: profile it again"
    )


def schedule(
    survivals: Sequence[Sequence[float]],
    *,
    mode: VerifyMode,
    tau: float = 0.0,
    min_verify_len: int = 0,
    fixed_len: int | None = None,
    step_curve: StepCurve | None = None,
    extra_tokens: int = 0,
    max_len: Sequence[int] | None = None,
    budget: int | None = None,
) -> list[int]:
    """Verify lengths of one step.

    Args:
        survivals: for each request a_1..a_γ' (a list or an array; empty for a request without drafts).
        mode: which policy decides.
        tau: survival threshold of fixed_tau, tau and tau+throughput.
        min_verify_len: drafts verified at least, in mode tau only.
        fixed_len: length of mode fixed_len; all drafts when None.
        step_curve: needed by the throughput modes; without one, or with a flat one, they follow tau alone.
        extra_tokens: prefill tokens in the same step.
        max_len: upper bound of each request's length (context end, tokens left, grammar); none when None.
        budget: drafts admitted in total instead of Algorithm 1, from `throughput_budget` (throughput modes).

    Returns:
        ℓ for each request, 0 ≤ ℓ ≤ its number of drafts and its max_len.
    """
    bounded = _usable(survivals, max_len)
    if mode == "fixed_len":
        return [len(a) if fixed_len is None else min(len(a), fixed_len) for a in bounded]
    if mode == "fixed_tau":
        return [_threshold_len(a, tau, 0) for a in bounded]
    if mode == "tau":
        return [_threshold_len(a, tau, min_verify_len) for a in bounded]
    by_tau = [_threshold_len(a, tau, 0) for a in bounded]
    if step_curve is None or step_curve.is_flat:
        return by_tau
    if budget is None:
        by_throughput = _causal_lengths(bounded, step_curve, extra_tokens)
    else:
        by_throughput = admit_top(bounded, budget)
    if mode == "throughput":
        return by_throughput
    return [min(pair) for pair in zip(by_tau, by_throughput, strict=True)]


def throughput_budget(
    survivals: Sequence[Sequence[float]], step_curve: StepCurve, extra_tokens: int = 0
) -> int:
    """The number of drafts K that maximises Θ over all K, past any dip of a jagged curve.

    Exact for sampled drafts only when `survivals` are those of an earlier step (the paper: two steps old).
    With argmax drafts or coupled verification the current ones may be used.

    Args:
        survivals: as in `schedule`.
        step_curve: profiled step cost.
        extra_tokens: prefill tokens in the same step.

    Returns:
        K; the smallest one among equals.
    """
    ranked = _usable(survivals, None)
    tokens = len(ranked) + extra_tokens
    expected = float(len(ranked))
    best, best_rate = 0, expected * step_curve.steps_per_second(tokens)
    descending = sorted((a for row in ranked for a in row), reverse=True)
    for admitted, value in enumerate(descending, start=1):
        expected += value
        rate = expected * step_curve.steps_per_second(tokens + admitted)
        if rate > best_rate:
            best, best_rate = admitted, rate
    return best


def admit_top(survivals: Sequence[Sequence[float]], budget: int) -> list[int]:
    """Admit the `budget` best drafts: exactly that many where there are as many, also when survivals tie.

    Args:
        survivals: as in `schedule`, each row non-increasing.
        budget: K.

    Returns:
        ℓ for each request.
    """
    lengths = [0] * len(survivals)
    heap = _first_candidates(survivals)
    while heap and budget > 0:
        _, position, request = heapq.heappop(heap)
        lengths[request] = position
        budget -= 1
        _push_next(heap, survivals, request, position)
    return lengths


def _causal_lengths(survivals: list[list[float]], step_curve: StepCurve, extra_tokens: int) -> list[int]:
    """Algorithm 1: admit the likeliest draft while that raises Θ, and stop at the first that does not.

    A request's next draft becomes a candidate only once the one before it has been admitted, so no decision
    uses a confidence that depends on a token the decision is about.
    """
    lengths = [0] * len(survivals)
    tokens = len(survivals) + extra_tokens
    expected = float(len(survivals))
    rate = expected * step_curve.steps_per_second(tokens) if tokens else 0.0
    heap = _first_candidates(survivals)
    while heap:
        negative, position, request = heapq.heappop(heap)
        tokens += 1
        expected -= negative
        new_rate = expected * step_curve.steps_per_second(tokens)
        if new_rate <= rate:
            break
        rate = new_rate
        lengths[request] = position
        _push_next(heap, survivals, request, position)
    return lengths


# Heap entries (-a, position from 1, request): the largest survival first, ties by position, then by request.
_Candidate = tuple[float, int, int]


def _first_candidates(survivals: Sequence[Sequence[float]]) -> list[_Candidate]:
    heap = [(-row[0], 1, request) for request, row in enumerate(survivals) if len(row)]
    heapq.heapify(heap)
    return heap


def _push_next(
    heap: list[_Candidate], survivals: Sequence[Sequence[float]], request: int, position: int
) -> None:
    if position < len(survivals[request]):
        heapq.heappush(heap, (-survivals[request][position], position + 1, request))


def _threshold_len(survival: list[float], tau: float, at_least: int) -> int:
    """max{k : a_k ≥ tau}; survivals do not rise."""
    length = 0
    for value in survival:
        if value < tau:
            break
        length += 1
    return max(length, min(at_least, len(survival)))


def _usable(survivals: Sequence[Sequence[float]], max_len: Sequence[int] | None) -> list[list[float]]:
    """Cut rows to their bounds, as plain floats in [0, 1] that do not rise (a drafter's NaN counts as 0)."""
    rows = []
    for request, row in enumerate(survivals):
        limit = len(row) if max_len is None else max(0, min(len(row), max_len[request]))
        floor, values = 1.0, []
        for value in row[:limit]:
            number = float(value)
            floor = min(floor, max(number, 0.0)) if number == number else 0.0  # noqa: PLR0124 - NaN test
            values.append(floor)
        rows.append(values)
    return rows


def check_lossless(
    exactness: Exactness,
    *,
    sampled_drafts: bool = False,
    scored_q: Literal["drawn_from", "one_hot_fallback"] = "drawn_from",
    confidence_head_type: Literal["linear", "mlp"] | None = None,
    length_rules: Collection[LengthRule] = (),
) -> None:
    """Refuse settings that together would change what the model says.

    Coupled verification and argmax drafts allow every rule. Drafts that are sampled and verified by the ratio
    rule allow only rules that are blind to the token they decide on.

    Args:
        exactness: how drafts are accepted; probabilistic means sampled drafts and the ratio rule.
        sampled_drafts: whether drafts are drawn from q, not an argmax.
        scored_q: what the ratio rule takes for q when drafts are sampled; one_hot_fallback takes a one-hot q
            for tokens whose real one is not at hand.
        confidence_head_type: mlp reads the drafted token x_k itself; None without a head.
        length_rules: everything that shortens the verified prefix.

    Raises:
        ExactnessError: naming the two settings.
    """
    if exactness == "coupled" or not (sampled_drafts or exactness == "probabilistic"):
        return
    setting = f"exactness {exactness!r} with sampled drafts"
    cure = "use exactness 'coupled' or argmax drafts"
    if scored_q == "one_hot_fallback":
        raise ExactnessError(
            f"{setting} and scored_q 'one_hot_fallback': which tokens fall back depends on the token; {cure}"
        )
    if confidence_head_type == "mlp" and set(length_rules) - {"fixed_len"}:
        raise ExactnessError(
            f"{setting} and confidence_head_type 'mlp': the head reads the token it decides about; "
            f"{cure}, or a checkpoint with a linear head"
        )
    for rule in sorted(set(length_rules) - _CAUSAL_RULES):
        raise ExactnessError(
            f"{setting} and length rule {rule!r}: it depends on the token it decides about; {cure}"
        )
