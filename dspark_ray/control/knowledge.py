"""What replicas of a model learn once and share: step-cost curves and calibrations."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dspark_ray.protocol import StepCost

POOLED_WEIGHT_MAX = 2000.0
"""Steps that the pooled curve counts for at most, so that it keeps following a changed machine."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """What a replica finds of others' knowledge; None where nobody left any."""

    step_cost: StepCost | None = None
    """As it was when this replica first looked."""
    calibration: bytes | None = None
    """A `decoding.calibration.CalibrationTable` in JSON, as last shared."""


def step_cost_key(model: str, device_kind: str, engine: Mapping[str, object]) -> str:
    """Name under which replicas that must have the same step cost share their curve.

    Args:
        model: the target.
        device_kind: such as ``cpu`` or the GPU's name.
        engine: whatever changes the cost of a step: dtype, parallel sizes, threads, engine arguments.
    """
    digest = hashlib.sha256(json.dumps(engine, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return f"{model}:{device_kind}:{digest}"


def calibration_key(checkpoint: Path) -> str:
    """Name under which verifiers of one draft checkpoint share its calibration.

    Of the checkpoint's configuration, provenance and own calibration: what is shared refines that very file, and
    is forgotten when another one or another drafter takes its place.
    """
    digest = hashlib.sha256()
    for file in sorted(checkpoint.glob("*.json")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:32]


def merge_step_costs(pooled: StepCost, measured: StepCost) -> StepCost:
    """One curve from two, weighted by the steps behind each.

    A point that only one curve has is kept if the other does not reach that far; inside the other's range it
    is averaged with the other's interpolation, so that neither curve's jumps are invented.

    Returns:
        The merged curve on the union of the points; its weight is bounded.
    """
    total = pooled.weight + measured.weight
    tokens = tuple(sorted({*pooled.tokens, *measured.tokens}))
    seconds = []
    for count in tokens:
        old, new = _at(pooled, count), _at(measured, count)
        if old is None or new is None:
            seconds.append(new if old is None else old)
        else:
            seconds.append((old * pooled.weight + new * measured.weight) / total)
    return StepCost(tokens, tuple(s for s in seconds if s is not None), min(total, POOLED_WEIGHT_MAX))


def _at(curve: StepCost, tokens: int) -> float | None:
    """Seconds of a step of that many tokens, linear between the curve's points; None outside them."""
    if not curve.tokens or not curve.tokens[0] <= tokens <= curve.tokens[-1]:
        return None
    for i, right in enumerate(curve.tokens):
        if right == tokens:
            return curve.seconds[i]
        if right > tokens:
            left = curve.tokens[i - 1]
            share = (tokens - left) / (right - left)
            return curve.seconds[i - 1] + share * (curve.seconds[i] - curve.seconds[i - 1])
    return None
