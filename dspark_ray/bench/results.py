"""What a run of `bench serve` measured, and the figures that follow from it. Pure: the report can be made again."""

import hashlib
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dspark_ray.bench.arms import Offer
from dspark_ray.bench.load import Turn
from dspark_ray.bench.speculation import DraftCounts
from dspark_ray.errors import ConfigError

PERCENTS = (50, 95, 99)


class RequestRecord(msgspec.Struct, frozen=True, array_like=True):
    """One answered request."""

    ttft_ms: float
    token_ms: float | None
    """Mean milliseconds a token after the first."""
    tokens: int
    prompt_tokens: int
    digest: str
    """Of the text, to compare arms."""


class TurnRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One load offered to one arm."""

    arm: str
    offer: str
    round: int
    seconds: float
    requests: list[RequestRecord]
    gap_ms: dict[str, float]
    """Percentiles of the time between events of a stream, by their name."""
    failed: int = 0
    error: str = ""
    """Of the first failed request, or of the turn."""
    counts: DraftCounts | None = None
    step_table: tuple[list[int], list[float]] = ([], [])
    load_average: float = 0.0
    """Of the machine over the last minute, after the turn."""
    busy_tokens: float = 0.0
    """Of a closed loop, while all its streams were under way."""
    busy_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """All streams together, prompts' time included; of a closed loop, while all of them were under way."""
        if self.busy_s:
            return self.busy_tokens / self.busy_s
        return sum(r.tokens for r in self.requests) / self.seconds if self.seconds else 0.0

    @property
    def user_tokens_per_s(self) -> float | None:
        """Median of the requests: what one stream shows after its first token."""
        times = [r.token_ms for r in self.requests if r.token_ms]
        return 1e3 / statistics.median(times) if times else None

    def goodput(self, sla_ms: float) -> float:
        """Tokens a second of the requests that took at most so many milliseconds a token."""
        good = sum(r.tokens for r in self.requests if r.token_ms is not None and r.token_ms <= sla_ms)
        return self.tokens_per_s * good / max(1, sum(r.tokens for r in self.requests))


class Results(msgspec.Struct, frozen=True):
    """All of a run."""

    about: dict[str, Any]
    """Machine, versions, settings."""
    arms: list[dict[str, Any]]
    offers: list[dict[str, Any]]
    baselines: list[str]
    """Arms that the others are compared with."""
    sla_ms: float
    price_per_hour: float
    turns: list[TurnRecord]

    @property
    def arm_names(self) -> list[str]:
        """In the order of the command line."""
        return [arm["name"] for arm in self.arms]

    @property
    def offer_labels(self) -> list[str]:
        """In the order of the command line."""
        return [Offer.model_validate(offer).label for offer in self.offers]


class Ratio(msgspec.Struct, frozen=True):
    """An arm against a baseline: median of the rounds, and the rounds that are furthest from it."""

    median: float
    lowest: float
    highest: float


class Row(msgspec.Struct, frozen=True):
    """One arm at one load, its rounds together."""

    arm: str
    offer: str
    rounds: int
    requests: int
    failed: int
    tokens_per_s: float
    user_tokens_per_s: float | None
    ttft_ms: dict[str, float]
    token_ms: dict[str, float]
    gap_ms: dict[str, float]
    goodput_tokens_per_s: float
    within_sla: float
    """Share of requests."""
    dollars_per_million_tokens: float | None
    ratios: dict[str, Ratio]
    """Tokens a second of all streams, by baseline."""
    user_ratios: dict[str, Ratio]
    """Tokens a second of a stream after its first token, by baseline."""
    same_text: float | None
    """Share of answers equal to the first baseline's."""
    counts: DraftCounts | None
    error: str


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """p50, p95 and p99, linear between neighbours; empty without values."""
    ordered = sorted(values)
    if not ordered:
        return {}

    def at(percent: int) -> float:
        place = percent / 100 * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (place - below) * (ordered[above] - ordered[below])

    return {f"p{percent}": round(at(percent), 3) for percent in PERCENTS}


def turn_record(
    arm: str,
    offer: str,
    number: int,
    turn: Turn,
    *,
    closed_loop: bool,
    counts: DraftCounts | None,
    step_table: tuple[list[int], list[float]] = ([], []),
    load_average: float = 0.0,
) -> TurnRecord:
    """A turn as it is kept."""
    busy_tokens, busy_s = turn.busy_part() if closed_loop else (0.0, 0.0)
    good = [answer for answer in turn.answers if not answer.error]
    errors = [answer.error for answer in turn.answers if answer.error]
    if counts is None and turn.draft_metrics:
        counts = msgspec.convert(turn.draft_metrics, DraftCounts)
    return TurnRecord(
        arm,
        offer,
        number,
        round(turn.seconds, 4),
        [
            RequestRecord(
                round(answer.ttft_s * 1e3, 2),
                None if answer.token_s is None else round(answer.token_s * 1e3, 3),
                answer.output_tokens,
                answer.prompt_tokens,
                hashlib.sha256(answer.text.encode()).hexdigest()[:12],
            )
            for answer in good
        ],
        percentiles(1e3 * gap for answer in good for gap in answer.gaps_s),
        failed=len(errors),
        error=errors[0].strip().splitlines()[-1] if errors else "",
        counts=counts,
        step_table=step_table,
        load_average=load_average,
        busy_tokens=round(busy_tokens, 2),
        busy_s=round(busy_s, 4),
    )


def summary(results: Results) -> list[Row]:
    """Rows in the order of loads, then arms; arms without any turn at a load are left out."""
    rows = []
    for offer in results.offer_labels:
        by_arm = {
            arm: [t for t in results.turns if t.arm == arm and t.offer == offer] for arm in results.arm_names
        }
        rows += [_row(results, arm, offer, by_arm) for arm in results.arm_names if by_arm[arm]]
    return rows


def _row(results: Results, arm: str, offer: str, by_arm: dict[str, list[TurnRecord]]) -> Row:
    turns = by_arm[arm]
    requests = [request for turn in turns for request in turn.requests]
    speed = statistics.median(turn.tokens_per_s for turn in turns)
    user = [turn.user_tokens_per_s for turn in turns if turn.user_tokens_per_s]
    token_ms = [r.token_ms for r in requests if r.token_ms is not None]
    counts = [turn.counts for turn in turns if turn.counts is not None]
    others = [name for name in results.baselines if name != arm and by_arm.get(name)]
    return Row(
        arm=arm,
        offer=offer,
        rounds=len(turns),
        requests=len(requests),
        failed=sum(turn.failed for turn in turns),
        tokens_per_s=speed,
        user_tokens_per_s=statistics.median(user) if user else None,
        ttft_ms=percentiles(r.ttft_ms for r in requests),
        token_ms=percentiles(token_ms),
        gap_ms=_medians([turn.gap_ms for turn in turns if turn.gap_ms]),
        goodput_tokens_per_s=statistics.median(turn.goodput(results.sla_ms) for turn in turns),
        within_sla=sum(ms <= results.sla_ms for ms in token_ms) / len(token_ms) if token_ms else 0.0,
        dollars_per_million_tokens=results.price_per_hour / (speed * 3600) * 1e6 if speed else None,
        ratios=_ratios(turns, by_arm, others, lambda turn: turn.tokens_per_s),
        user_ratios=_ratios(turns, by_arm, others, lambda turn: turn.user_tokens_per_s),
        same_text=_same_text(turns, by_arm.get(results.baselines[0], [])) if others else None,
        counts=sum(counts[1:], counts[0]) if counts else None,
        error=next((turn.error for turn in turns if turn.error), ""),
    )


def _medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]} if rows else {}


def _ratios(
    turns: Sequence[TurnRecord],
    by_arm: dict[str, list[TurnRecord]],
    others: Sequence[str],
    speed: Callable[[TurnRecord], float | None],
) -> dict[str, Ratio]:
    """Each round is compared with the baseline's turn of the same round, and the ratios are put in order."""
    ratios = {}
    for other in others:
        partner = {turn.round: speed(turn) for turn in by_arm[other]}
        paired = sorted(
            mine / theirs for turn in turns if (mine := speed(turn)) and (theirs := partner.get(turn.round))
        )
        if paired:
            ratios[other] = Ratio(statistics.median(paired), paired[0], paired[-1])
    return ratios


def _same_text(turns: Sequence[TurnRecord], baseline: Sequence[TurnRecord]) -> float | None:
    """Only rounds without failures count: there the requests of two arms stand side by side."""
    partner = {turn.round: turn for turn in baseline if not turn.failed}
    pairs = [
        mine.digest == theirs.digest
        for turn in turns
        if not turn.failed and turn.round in partner
        for mine, theirs in zip(turn.requests, partner[turn.round].requests, strict=False)
    ]
    return sum(pairs) / len(pairs) if pairs else None


def save(results: Results, path: Path) -> None:
    """Write the JSON file, with the summary in it for those who read no Python."""
    document = msgspec.to_builtins(results) | {"summary": msgspec.to_builtins(summary(results))}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))


def load(path: Path) -> Results:
    """Read what `save` wrote.

    Raises:
        ConfigError: it is something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: not a result of `dspark-ray bench serve`: {error}") from None
