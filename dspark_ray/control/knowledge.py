"""What replicas of a model learn once and share: step-cost curves and calibration temperatures."""

import hashlib
import json
from collections.abc import Mapping

from dspark_ray.protocol import StepCost

POOLED_WEIGHT_MAX = 2000.0
"""Steps that the pooled curve counts for at most, so that it keeps following a changed machine."""


def step_cost_key(model: str, device_kind: str, engine: Mapping[str, object]) -> str:
    """Name under which replicas that must have the same step cost share their curve.

    Args:
        model: the target.
        device_kind: such as ``cpu`` or the GPU's name.
        engine: whatever changes the cost of a step: dtype, parallel sizes, threads, engine arguments.
    """
    digest = hashlib.sha256(json.dumps(engine, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return f"{model}:{device_kind}:{digest}"


def temperatures_key(drafter_fingerprint: str, exactness: str, bucket: str, block_size: int) -> str:
    """Name of STS temperatures, which hold for one drafter, mode, temperature bucket and block size (spec 3).

    Args:
        drafter_fingerprint: of the checkpoint.
        exactness: acceptance mode.
        bucket: `decoding.calibration.temperature_bucket` of the requests.
        block_size: γ'.
    """
    return f"{drafter_fingerprint}:{exactness}:{bucket}:{block_size}"


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
