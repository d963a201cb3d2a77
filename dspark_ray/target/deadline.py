"""How long a step waits for its drafts."""

FIRST_S = 1.0
LEAST_S = 0.005
MOST_S = 1.0
_MEAN_GAIN, _SPREAD_GAIN = 1 / 8, 1 / 4
_SPREADS = 4.0


class Deadline:
    """Mean round trip plus four mean deviations, as TCP sets its retransmission timer (RFC 6298).

    Late replies are observed too, so a drafter that has become slower for good is waited for again.

    Args:
        fixed_ms: this deadline always; the estimate when None.
    """

    def __init__(self, fixed_ms: float | None):
        self._fixed_s = None if fixed_ms is None else fixed_ms / 1e3
        self._mean_s: float | None = None
        self._spread_s = 0.0

    @property
    def seconds(self) -> float:
        """The deadline of a call that is sent now."""
        if self._fixed_s is not None:
            return self._fixed_s
        if self._mean_s is None:
            return FIRST_S
        return min(MOST_S, max(LEAST_S, self._mean_s + _SPREADS * self._spread_s) + LEAST_S)

    def observe(self, round_trip_s: float) -> None:
        """Take in the round trip of a reply, late or not."""
        if self._mean_s is None:
            self._mean_s, self._spread_s = round_trip_s, round_trip_s / 2
            return
        self._spread_s += _SPREAD_GAIN * (abs(round_trip_s - self._mean_s) - self._spread_s)
        self._mean_s += _MEAN_GAIN * (round_trip_s - self._mean_s)
