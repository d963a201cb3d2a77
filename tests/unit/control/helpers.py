"""Samples and a clock for the control tests."""

from typing import Any

from dspark_ray.protocol import CalibrationBins, LoadSample


class Clock:
    """A monotonic clock that only moves when told to."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def verifier(replica: str = "v0", sequence: int = 1, **fields: Any) -> LoadSample:
    fields = {"model": "m", "kv_blocks_total": 100, "uptime_s": sequence * 0.2, **fields}
    return LoadSample(role="verifier", replica=replica, sequence=sequence, **fields)


def drafter(replica: str = "d0", sequence: int = 1, **fields: Any) -> LoadSample:
    fields = {"model": "m", "slots_total": 64, "endpoint": f"tcp://{replica}", **fields}
    return LoadSample(role="drafter", replica=replica, sequence=sequence, **fields)


def bins(count: int, predicted: float, accepted: float) -> CalibrationBins:
    """All positions in one bin."""
    return CalibrationBins((count, 0), (count * predicted, 0.0), (round(count * accepted), 0))
