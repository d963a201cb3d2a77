"""How often the drafter's confidence was right in one verifier, counted for the cluster scheduler."""

from collections.abc import Sequence

from dspark_ray.decoding.calibration import CalibrationTable, Scaling, round_survivals
from dspark_ray.protocol import CalibrationBins, RoundRecord

BINS = 20


class CalibrationTally:
    """Predicted against observed acceptance over the fully verified rounds, in equal bins of survival.

    Only full rounds count: in the others the length was chosen by the very prediction.
    """

    def __init__(self, calibration: CalibrationTable | None) -> None:
        """Counts with the calibration that the verifier schedules with."""
        self._calibration = calibration
        self._counts = [0] * BINS
        self._predicted = [0.0] * BINS
        self._accepted = [0] * BINS

    def use(self, calibration: CalibrationTable | None) -> None:
        """Count with another one from now on."""
        self._calibration = calibration

    def count(self, rounds: Sequence[RoundRecord]) -> None:
        """Take in some rounds."""
        for record in rounds:
            scaling = self._scaling(record)
            if scaling is None and self._has_fits(record.exactness):
                continue  # shorter than any block that was fitted: no fit claims to predict it
            predicted = round_survivals(record.confidence_logits, scaling)
            for k, survival in enumerate(predicted, start=1):
                bin_ = min(BINS - 1, int(survival * BINS))
                self._counts[bin_] += 1
                self._predicted[bin_] += survival
                self._accepted[bin_] += k <= record.accept_len

    def bins(self) -> CalibrationBins | None:
        """The counters so far; None before the first round."""
        if not any(self._counts):
            return None
        return CalibrationBins(tuple(self._counts), tuple(self._predicted), tuple(self._accepted))

    def _has_fits(self, exactness: str) -> bool:
        entries = self._calibration.entries if self._calibration is not None else []
        return any(entry.exactness == exactness for entry in entries)

    def _scaling(self, record: RoundRecord) -> Scaling | None:
        if self._calibration is None:
            return None
        block_size = len(record.confidence_logits)
        return self._calibration.scaling_for(record.exactness, record.temperature, block_size)
