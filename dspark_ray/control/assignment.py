"""Which drafter a new request goes to. Running requests stay where they are; only new ones are steered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HEADROOM_SHARE = 0.25
SLOWEST = 1e-6
"""Draft calls a second below which a speed counts as unknown."""


@dataclass(frozen=True, slots=True)
class DrafterState:
    """What assignment needs to know of one drafter."""

    requests: int
    """Requests that it holds context for, plus calls that wait."""
    slots_total: int
    """Requests that it can hold context for; 0 is unknown."""
    speed: float
    """Draft calls it can do in a second, relative to its peers; 0 is unknown."""
    miss_share: float = 0.0
    """Share of its calls that missed their deadline."""


def drafter_weights(drafters: Mapping[str, DrafterState]) -> dict[str, float]:
    """Shares of the *new* requests, from how far each drafter is below its fair number of requests.

    A drafter's fair number is its share of the pool's speed (misses count against it) times the requests of
    the pool with some headroom for new ones. So a drafter that joins gets most new requests until it has
    caught up, one that leaves is simply absent, and a drafter twice as fast carries twice as many. A drafter
    without a free slot gets none while another has one.

    Args:
        drafters: the live drafters of one model by name.

    Returns:
        Weights by name that sum to 1; empty for an empty pool.
    """
    if not drafters:
        return {}
    open_ones = {n: d for n, d in drafters.items() if not d.slots_total or d.requests < d.slots_total}
    pool = open_ones or dict(drafters)
    known = [d.speed for d in pool.values() if d.speed > SLOWEST]
    typical = sum(known) / len(known) if known else 1.0
    speeds = {
        n: (d.speed if d.speed > SLOWEST else typical) * max(0.05, 1.0 - d.miss_share)
        for n, d in pool.items()
    }
    total_speed = sum(speeds.values())
    held = sum(d.requests for d in pool.values())
    planned = held + max(float(len(pool)), HEADROOM_SHARE * held)
    missing = {n: max(0.0, planned * speeds[n] / total_speed - d.requests) for n, d in pool.items()}
    total_missing = sum(missing.values())
    return {n: missing.get(n, 0.0) / total_missing for n in drafters}


class DrafterPicker:
    """Spreads one verifier's new requests over drafters by weight, evenly also inside a burst.

    Smooth weighted round robin: each drafter gains its weight, the richest is picked and pays the total.
    Weights may change between calls, drafters come and go.
    """

    def __init__(self, start: float = 0.0) -> None:
        """A picker.

        Args:
            start: in [0, 1), different for each verifier, so that they begin with different drafters.
        """
        self._start = start
        self._credit: dict[str, float] = {}

    def pick(self, weights: Mapping[str, float], avoid: Sequence[str] = ()) -> str | None:
        """The drafter for one new request.

        Args:
            weights: shares by name, from the policy; equal ones where there is no policy.
            avoid: drafters known to be unreachable; used only when there is no other.

        Returns:
            A name out of weights, or None when weights is empty.
        """
        candidates = [n for n in weights if n not in avoid] or list(weights)
        if not candidates:
            return None
        positive = [n for n in candidates if weights[n] > 0] or candidates
        shares = {n: weights[n] or 1.0 for n in positive}
        total = sum(shares.values())
        if not self._credit:
            first = sorted(positive)[int(self._start * len(positive)) % len(positive)]
            self._credit[first] = total / 2
        for name in self._credit.keys() - weights.keys():
            del self._credit[name]
        for name, share in shares.items():
            self._credit[name] = self._credit.get(name, 0.0) + share
        picked = max(sorted(shares), key=lambda n: self._credit[n])
        self._credit[picked] -= total
        return picked
