"""Who is alive and how fast it goes, judged by the reader alone."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from dspark_ray.protocol import CalibrationBins, LoadSample

MIN_CALIBRATION_POSITIONS = 100
BURIED_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Rates:
    """What a replica did between two of its samples. Everything is 0 where nothing was counted."""

    seconds: float = 0.0
    tokens_per_s: float = 0.0
    """Committed tokens a second: the goodput that a policy steers on."""
    accept_len: float = 0.0
    """Mean committed tokens a round, bonus token included."""
    verify_len: float = 0.0
    """Mean verified drafts per request and step, steps without any included: 0 where nothing is verified."""
    waste: float = 0.0
    """Rejected over verified drafts."""
    miss_share: float = 0.0
    """Draft calls past their deadline."""
    draft_calls_per_s: float = 0.0
    drafted_per_s: float = 0.0

    @classmethod
    def between(cls, before: LoadSample, after: LoadSample) -> "Rates":
        """Rates from two samples of the same replica, in the order in which it wrote them."""
        seconds = after.uptime_s - before.uptime_s
        if seconds <= 0:
            return IDLE
        rounds = after.rounds - before.rounds
        verified = after.tokens_verified - before.tokens_verified
        accepted = after.tokens_accepted - before.tokens_accepted
        committed = after.tokens_committed - before.tokens_committed
        own = committed - accepted  # the target's own tokens: one for each request and step
        calls = after.draft_calls - before.draft_calls
        return cls(
            seconds,
            committed / seconds,
            1.0 + accepted / rounds if rounds > 0 else 0.0,
            verified / own if own > 0 else 0.0,
            (after.tokens_wasted - before.tokens_wasted) / verified if verified > 0 else 0.0,
            (after.deadline_misses - before.deadline_misses) / calls if calls > 0 else 0.0,
            calls / seconds,
            (after.tokens_drafted - before.tokens_drafted) / seconds,
        )


IDLE = Rates()


def calibration_drift(before: CalibrationBins, after: CalibrationBins) -> float | None:
    """How far predicted and observed acceptance are apart, beyond chance, between two times.

    The expected calibration error over the bins, each bin's gap less two standard deviations of what chance
    alone would give: a few hundred positions over 20 bins would otherwise always look wrong.

    Returns:
        The gap in [0, 1]; None if fewer than 100 positions were verified.
    """
    if len(after.counts) != len(before.counts):
        return None
    positions = sum(after.counts) - sum(before.counts)
    if positions < MIN_CALIBRATION_POSITIONS:
        return None
    excess = 0.0
    for i, count in enumerate(after.counts):
        n, predicted = count - before.counts[i], after.predicted[i] - before.predicted[i]
        if n > 0:
            chance = math.sqrt(max(0.0, predicted * (1.0 - predicted / n)))
            excess += max(0.0, abs(predicted - (after.accepted[i] - before.accepted[i])) - 2.0 * chance)
    return excess / positions


@dataclass(slots=True)
class Member:
    """A replica as the reader knows it."""

    sample: LoadSample
    changed_at_s: float
    """The book's own clock at the last change of the sample."""
    window: deque[LoadSample] = field(default_factory=deque)
    bins: CalibrationBins | None = None
    """The last ones sent."""

    def rates(self) -> Rates:
        """Rates over the book's window."""
        return Rates.between(self.window[0], self.sample) if self.window else IDLE

    def accept_len(self) -> float:
        """`Rates.accept_len` alone."""
        first, last = self.window[0], self.sample
        rounds = last.rounds - first.rounds
        return 1.0 + (last.tokens_accepted - first.tokens_accepted) / rounds if rounds > 0 else 0.0


class SampleBook:
    """The replicas that are alive, and a short window of what each reported.

    A replica lives as long as its samples change, seen on the reader's clock: the writer's clock may be wrong
    by hours. Only time in which the store could be read counts, so an outage of the store kills nobody.
    """

    def __init__(self, lifetime_s: float, window_s: float = 3.0) -> None:
        """An empty book.

        Args:
            lifetime_s: a replica whose sample has not changed for this long is dead.
            window_s: length of the window that rates are taken over, on the writer's monotonic clock.
        """
        self.members: dict[str, Member] = {}
        # A dead replica's last sample stays in the store for a while: that does not bring it back.
        self._buried: dict[str, int] = {}
        self._lifetime_s = lifetime_s
        self._window_s = window_s
        self._longest_step_s = lifetime_s / 4
        self._clock_s = 0.0
        self._observed_at_s: float | None = None

    @property
    def observed_s(self) -> float:
        """Time over which the store could be read."""
        return self._clock_s

    def observe(self, samples: Iterable[LoadSample], now_s: float) -> list[str]:
        """Take in what one successful read of the store returned.

        Args:
            samples: the latest sample of each replica that the store has.
            now_s: the reader's monotonic clock.

        Returns:
            Names of the replicas that died since the last call.
        """
        if self._observed_at_s is not None:
            self._clock_s += min(max(0.0, now_s - self._observed_at_s), self._longest_step_s)
        self._observed_at_s = now_s
        for sample in samples:
            member = self.members.get(sample.replica)
            if member is None:
                if self._buried.get(sample.replica) != sample.sequence:
                    self._buried.pop(sample.replica, None)
                    self.members[sample.replica] = Member(
                        sample, self._clock_s, deque([sample]), sample.calibration
                    )
            elif sample.sequence != member.sample.sequence:
                self._extend(member, sample)
        deadline_s = self._clock_s - self._lifetime_s
        dead = [name for name, member in self.members.items() if member.changed_at_s < deadline_s]
        for name in dead:
            self._buried[name] = self.members.pop(name).sample.sequence
        while len(self._buried) > BURIED_MAX:
            del self._buried[next(iter(self._buried))]
        return dead

    def _extend(self, member: Member, sample: LoadSample) -> None:
        """A changed sample: the replica is alive. Restarted counters start a new window."""
        window = member.window
        if sample.uptime_s < member.sample.uptime_s:
            window.clear()
        member.sample = sample
        member.bins = sample.calibration or member.bins
        member.changed_at_s = self._clock_s
        window.append(sample)
        while len(window) > 2 and sample.uptime_s - window[1].uptime_s >= self._window_s:
            window.popleft()
