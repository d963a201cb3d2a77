"""How often the drafter's confidence was right in one verifier, counted for the cluster scheduler."""

import math
from collections.abc import Sequence

from dspark_ray.decoding.calibration import CalibrationTable, Scaling
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
            survival = 1.0
            for k, (logit, temperature, offset) in enumerate(
                zip(record.confidence_logits, *scaling, strict=True), start=1
            ):
                survival *= 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, (logit - offset) / temperature))))
                bin_ = min(BINS - 1, int(survival * BINS))
                self._counts[bin_] += 1
                self._predicted[bin_] += survival
                self._accepted[bin_] += k <= record.accept_len

    def bins(self) -> CalibrationBins | None:
        """The counters so far; None before the first round."""
        if not any(self._counts):
            return None
        return CalibrationBins(tuple(self._counts), tuple(self._predicted), tuple(self._accepted))

    def _scaling(self, record: RoundRecord) -> Scaling:
        count = len(record.confidence_logits)
        table = self._calibration
        fitted = table and table.scaling_for(record.exactness, record.temperature, count)
        return fitted or Scaling([1.0] * count, [0.0] * count)
