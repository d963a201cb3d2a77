"""What a step costs: profiled on the engine at start-up, kept up to date from the steps themselves."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from dspark_ray.decoding.prefix_scheduler import StepCurve

_SCALE_GAIN = 0.10
_SHAPE_GAIN = 0.02
_MOST_BENT = 2.0
_REBUILD_EVERY = 16
_DRAFT_GAIN = 0.1


def profile_sizes(max_tokens: int) -> list[int]:
    """Token counts worth measuring: every step up to 8, then about five an octave."""
    sizes = [*range(1, 9)]
    while sizes[-1] < max_tokens:
        sizes.append(max(sizes[-1] + 1, round(sizes[-1] * 1.15)))
    return [size for size in sizes if size < max_tokens] + [max_tokens]


def measure_steps(
    run: Callable[[int], None], sizes: Sequence[int], clock: Callable[[], float], rounds: int = 3
) -> list[float]:
    """Median milliseconds of ``run(size)`` for each size, after one unmeasured round."""
    times: list[list[float]] = [[] for _ in sizes]
    for attempt in range(rounds + 1):
        for index, size in enumerate(sizes):
            started = clock()
            run(size)
            if attempt:
                times[index].append((clock() - started) * 1e3)
    return [sorted(values)[len(values) // 2] for values in times]


class StepProfile:
    """Milliseconds of a step by verified tokens, and of a draft call by requests.

    Two scales, since a step that verifies drafts has work about it that a plain one lacks, of which no dummy step at
    start-up knows; with one, whichever kind of step is the rule would look like what the other costs.

    Args:
        sizes: token counts, ascending.
        step_ms: measured at start-up, without drafting.
    """

    def __init__(self, sizes: Sequence[int], step_ms: Sequence[float]):
        self.sizes = list(sizes)
        self._start_ms = list(step_ms)
        self._shape = [1.0] * len(self.sizes)
        self._scale = {True: 1.0, False: 1.0}
        self.observed = 0
        self._draft_ms: dict[int, float] = {}
        self._curves: dict[int, StepCurve] = {}

    @property
    def step_ms(self) -> list[float]:
        """Milliseconds at each size now of a step that verifies drafts, without the draft call."""
        return [self._at(index, plain=False) for index in range(len(self.sizes))]

    def adopt(self, tokens: Sequence[int], step_ms: Sequence[float]) -> None:
        """Go on from a curve that engines alike have measured; sizes beyond its ends keep what they have.

        Args:
            tokens: ascending.
            step_ms: of a step of so many tokens, without drafting.
        """
        pooled = StepCurve(tuple(tokens), tuple(step_ms))
        self._start_ms = [
            pooled.milliseconds(size) if tokens[0] <= size <= tokens[-1] else own
            for size, own in zip(self.sizes, self.step_ms, strict=True)
        ]
        # what is pooled are steps that verify drafts: how plain ones differ stays known
        self._scale = {True: self._scale[True] / self._scale[False], False: 1.0}
        self._shape = [1.0] * len(self.sizes)
        self._curves.clear()

    def observe_step(self, tokens: int, milliseconds: float, *, plain: bool) -> None:
        """Take in one step without its draft call.

        One scale for all sizes follows quickly: what makes one step slower (another process on the cores, longer
        contexts) makes the others slower too. What remains bends the curve at the neighbouring sizes.

        Args:
            tokens: of all requests.
            milliseconds: measured.
            plain: whether each request had its one token, and none had drafts.
        """
        if not 0 < tokens <= self.sizes[-1] or milliseconds <= 0:
            return
        ratio = min(4.0, max(0.25, milliseconds / self._interpolated(tokens, plain=plain)))
        self._scale[plain] *= 1 + _SCALE_GAIN * (ratio - 1)
        upper = bisect_left(self.sizes, tokens)
        for index in {upper} if self.sizes[upper] == tokens else {upper - 1, upper}:
            bent = self._shape[index] * (1 + _SHAPE_GAIN * (ratio - 1))
            self._shape[index] = min(_MOST_BENT, max(1 / _MOST_BENT, bent))
        self.observed += 1
        if self.observed % _REBUILD_EVERY == 0:
            self._curves.clear()

    def observe_draft(self, requests: int, milliseconds: float) -> None:
        """Take in the time one draft call kept the step waiting."""
        known = self._draft_ms.get(requests)
        self._draft_ms[requests] = (
            milliseconds if known is None else known + _DRAFT_GAIN * (milliseconds - known)
        )

    def draft_ms(self, requests: int) -> float:
        """Expected wait for a draft call of that many requests; that of the nearest number known, else 0."""
        if not self._draft_ms:
            return 0.0
        return self._draft_ms[min(self._draft_ms, key=lambda known: abs(known - requests))]

    def curve(self, requests: int) -> StepCurve:
        """The whole step's curve with a draft call of that many requests in it."""
        if requests not in self._curves:
            draft = self.draft_ms(requests)
            self._curves[requests] = StepCurve(tuple(self.sizes), tuple(ms + draft for ms in self.step_ms))
        return self._curves[requests]

    def milliseconds(self, tokens: int, *, plain: bool) -> float:
        """A step of that many tokens, plain or with drafts among them, without a draft call."""
        return self._interpolated(min(max(tokens, 1), self.sizes[-1]), plain=plain)

    @property
    def is_jagged(self) -> bool:
        """Whether the curve has a plateau behind a rise, where the greedy scheduler would stop too early."""
        times = self.step_ms
        slopes = [
            (later - earlier) / (b - a)
            for a, b, earlier, later in zip(self.sizes, self.sizes[1:], times, times[1:], strict=False)
        ]
        steepest = 0.0
        for slope in slopes:
            if slope < steepest / 2:
                return True
            steepest = max(steepest, slope)
        return False

    def _at(self, index: int, *, plain: bool) -> float:
        return self._scale[plain] * self._start_ms[index] * self._shape[index]

    def _interpolated(self, tokens: int, *, plain: bool) -> float:
        index = bisect_left(self.sizes, tokens)
        upper = self._at(index, plain=plain)
        if self.sizes[index] == tokens:
            return upper
        below, above = self.sizes[index - 1], self.sizes[index]
        lower = self._at(index - 1, plain=plain)
        return lower + (tokens - below) / (above - below) * (upper - lower)
