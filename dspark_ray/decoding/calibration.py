"""Calibrating confidences: Sequential Temperature Scaling and the measures around it (spec section 3).

Symbols: N rounds, γ draft positions. Everything is numpy; nothing draws random numbers or reads a clock.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError, model_validator

from dspark_ray.config import Exactness, FrozenModel
from dspark_ray.errors import CheckpointError, ConfigError

FloatArray = npt.NDArray[np.float64]

CALIBRATION_FILE_NAME = "sts.json"
ECE_BINS = 20
_NEWTON_STEPS, _PRIOR_ROUNDS, _LEAST_SLOPE = 20, 10.0, 0.1
# Symmetric around 1 on a log scale, so that T = 1 (no change) is one of the candidates.
TEMPERATURE_GRID: tuple[float, ...] = tuple(float(t) for t in np.geomspace(0.1, 10.0, 201))
# Upper ends of the buckets of a request's sampling temperature; the first is greedy.
TEMPERATURE_BUCKETS: tuple[tuple[str, float], ...] = (
    ("greedy", 1e-5),
    ("low", 0.5),
    ("medium", 1.0),
    ("high", float("inf")),
)


def temperature_bucket(temperature: float) -> str:
    """The bucket of TEMPERATURE_BUCKETS that a request's sampling temperature falls into."""
    if temperature < TEMPERATURE_BUCKETS[0][1]:
        return TEMPERATURE_BUCKETS[0][0]
    return next(name for name, upper in TEMPERATURE_BUCKETS[1:] if temperature <= upper)


class Scaling(NamedTuple):
    """What makes confidences of logits: c_k = σ((z_k - o_k) / T_k)."""

    temperatures: Sequence[float]
    """T_k, at least γ of them."""
    offsets: Sequence[float]
    """o_k, as many."""


def confidences(logits: npt.ArrayLike, scaling: Scaling | None = None) -> FloatArray:
    """σ((z_k - o_k) / T_k).

    Args:
        logits: [..., γ] outputs z of the confidence head.
        scaling: None uses them as they are.

    Returns:
        [..., γ] in [0, 1].
    """
    z = np.asarray(logits, dtype=np.float64)
    if scaling is not None:
        temperatures, offsets = (np.asarray(values, dtype=np.float64)[: z.shape[-1]] for values in scaling)
        z = (z - offsets) / temperatures
    sigmoid: FloatArray = 0.5 * (1.0 + np.tanh(0.5 * z))  # without overflow at either end
    return sigmoid


def survivals(logits: npt.ArrayLike, scaling: Scaling | None = None) -> FloatArray:
    """a_k = Π_{i≤k} c_i: the chance that the first k drafts are all accepted. [..., γ]."""
    products: FloatArray = np.cumprod(confidences(logits, scaling), axis=-1, dtype=np.float64)
    return products


def round_survivals(logits: Sequence[float], scaling: Scaling | None) -> list[float]:
    """`survivals` of one round without arrays: on the token path small ones cost more than the sums.

    Args:
        logits: z_1..z_γ'.
        scaling: None uses them as they are, as it does those past its end.
    """
    fitted = 0 if scaling is None else len(scaling.temperatures)
    survival, result = 1.0, []
    for k, z in enumerate(logits):
        scaled = (z - scaling.offsets[k]) / scaling.temperatures[k] if scaling and k < fitted else z
        survival *= 1 / (1 + math.exp(-max(-60.0, min(60.0, scaled))))
        result.append(survival)
    return result


class ReliabilityBins(FrozenModel):
    """What a reliability diagram shows. Lists have one entry per bin; empty bins hold 0 means."""

    counts: list[int]
    """Predictions in the bin."""
    mean_predicted: list[float]
    """Mean predicted probability of the bin."""
    mean_observed: list[float]
    """Share of positive outcomes in the bin."""


def reliability_bins(
    predicted: npt.ArrayLike, outcome: npt.ArrayLike, bins: int = ECE_BINS
) -> ReliabilityBins:
    """Group predictions into equal-width bins of [0, 1]; 1.0 belongs to the last bin.

    Args:
        predicted: [N] probabilities.
        outcome: [N] 0/1.
        bins: number of bins.
    """
    counts, sum_predicted, sum_observed = _bin_sums(*_paired(predicted, outcome), bins)
    safe = np.maximum(counts, 1)
    return ReliabilityBins(
        counts=counts.astype(int).tolist(),
        mean_predicted=(sum_predicted / safe).tolist(),
        mean_observed=(sum_observed / safe).tolist(),
    )


def expected_calibration_error(
    predicted: npt.ArrayLike, outcome: npt.ArrayLike, bins: int = ECE_BINS
) -> float:
    """Mean over bins, weighted by their size, of |mean predicted - share observed|. 0.0 when N = 0."""
    p, y = _paired(predicted, outcome)
    _, sum_predicted, sum_observed = _bin_sums(p, y, bins)
    return float(np.abs(sum_predicted - sum_observed).sum() / max(len(p), 1))


def area_under_roc(score: npt.ArrayLike, outcome: npt.ArrayLike) -> float:
    """Chance that a positive outcome scores above a negative one, ties counting half.

    Returns:
        The area, or nan when the outcomes are all alike.
    """
    s, y = _paired(score, outcome)
    positives = float(y.sum())
    negatives = len(y) - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    _, inverse, counts = np.unique(s, return_inverse=True, return_counts=True)
    mean_ranks = np.cumsum(counts) - (counts - 1) / 2.0  # ranks start at 1; tied scores share their mean rank
    rank_sum = float((mean_ranks[inverse] * y).sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


class Calibration(FrozenModel):
    """Temperatures fitted for one (exactness mode, temperature bucket) and one block size."""

    exactness: Exactness
    """The acceptance rule under which the rounds were collected."""
    temperature_bucket: str
    """Bucket of the requests' sampling temperature, see TEMPERATURE_BUCKETS."""
    block_size: int = Field(ge=1)
    """γ' of the rounds; a shorter block changes the hidden states, so the fit is valid for this one only."""
    temperatures: list[float] = Field(min_length=1)
    """T_k for k = 1..γ'."""
    offsets: list[float] = Field(default_factory=list)
    """o_k for k = 1..γ'; none are zeros, as in a file of before there were any."""
    dataset: str
    """Where the rounds came from."""
    sample_count: int = Field(ge=0)
    """Rounds used: verified in full."""
    ece_before: list[float]
    """Expected calibration error of a_k for each k, uncalibrated."""
    ece_after: list[float]
    """The same with the temperatures."""
    auc: list[float | None]
    """Area under the ROC curve of a_k (calibrated) for each k; null where the outcomes are all alike."""
    wrong_side_share: list[float]
    """For each k, the share of rounds whose σ(z_k) is on the other side of .5 than what was observed for such
    logits: a temperature alone cannot move it across, which is what the offsets are for."""

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        lists = (self.temperatures, self.ece_before, self.ece_after, self.auc, self.wrong_side_share)
        if any(len(values) != self.block_size for values in lists) or (
            self.offsets and len(self.offsets) != self.block_size
        ):
            raise ValueError("temperatures, offsets and measures must have block_size entries")
        if min(self.temperatures) <= 0:
            raise ValueError("temperatures must be positive")
        return self

    @property
    def scaling(self) -> Scaling:
        """What to use confidences with."""
        return Scaling(self.temperatures, self.offsets or [0.0] * self.block_size)


class CalibrationTable(FrozenModel):
    """All calibrations of a draft checkpoint, stored beside it as sts.json."""

    entries: list[Calibration]
    """At most one per (exactness, temperature bucket, block size)."""

    def scaling_for(self, exactness: str, temperature: float, block_size: int) -> Scaling | None:
        """What to scale rounds of this kind with, from the nearest temperature bucket that was fitted.

        Args:
            exactness: acceptance mode in use.
            temperature: the request's sampling temperature.
            block_size: γ' in use.

        Returns:
            Of γ' positions, or None when nothing was fitted for this mode and block size.
        """
        names = [name for name, _ in TEMPERATURE_BUCKETS]
        wanted = names.index(temperature_bucket(temperature))
        fitting = [e for e in self.entries if e.exactness == exactness and e.block_size == block_size]
        if not fitting:
            return None
        return min(fitting, key=lambda e: abs(names.index(e.temperature_bucket) - wanted)).scaling

    @model_validator(mode="after")
    def _entries_are_distinct_and_named(self) -> Self:
        keys = [(e.exactness, e.temperature_bucket, e.block_size) for e in self.entries]
        if len(set(keys)) != len(keys):
            raise ValueError("entries: two calibrations for one exactness, temperature bucket and block size")
        unknown = {e.temperature_bucket for e in self.entries} - {name for name, _ in TEMPERATURE_BUCKETS}
        if unknown:
            raise ValueError(f"entries: unknown temperature_bucket {sorted(unknown)}")
        return self

    def save(self, folder: Path) -> None:
        """Write sts.json into the checkpoint's folder."""
        (folder / CALIBRATION_FILE_NAME).write_text(self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Read the folder's sts.json, or None when there is none.

        Raises:
            CheckpointError: the file is there and not valid.
        """
        path = folder / CALIBRATION_FILE_NAME
        if not path.exists():
            return None
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise CheckpointError(f"{path}: {error.errors()[0]['msg']}; fit it again") from None


def fit_calibration(
    confidence_logits: npt.ArrayLike,
    verify_len: npt.ArrayLike,
    accept_len: npt.ArrayLike,
    *,
    exactness: Exactness,
    temperature: float,
    dataset: str,
    grid: Sequence[float] = TEMPERATURE_GRID,
) -> Calibration:
    """Sequential Temperature Scaling: T_1, then T_2 with T_1 fixed, and so on (spec section 3).

    T_k minimises the ECE of a_k against y_k = 1[the first k drafts were all accepted], after an offset o_k for what
    no temperature can do, move a confidence across .5. Only rounds that were verified in full count: a truncated
    one hides what would have happened to the rest.

    Args:
        confidence_logits: [N, γ] z of each round.
        verify_len: [N] drafts verified, ℓ.
        accept_len: [N] drafts accepted, A (bonus not counted).
        exactness: acceptance mode of the rounds.
        temperature: sampling temperature of the rounds' requests.
        dataset: name of the data, for the record.
        grid: candidate temperatures.

    Raises:
        ConfigError: shapes disagree, or no round was verified in full.
    """
    z = np.asarray(confidence_logits, dtype=np.float64)
    verified, accepted = np.asarray(verify_len), np.asarray(accept_len)
    if z.ndim != 2 or verified.shape != z.shape[:1] or accepted.shape != z.shape[:1]:
        raise ConfigError(
            "confidence_logits [N, γ], verify_len [N] and accept_len [N] disagree: "
            f"{z.shape}, {verified.shape}, {accepted.shape}"
        )
    block_size = z.shape[1]
    full = verified >= block_size
    z, accepted = z[full], accepted[full]
    if len(z) == 0:
        raise ConfigError(
            "no round was verified in full: raise scheduling.full_round_share, or use mode fixed_len"
        )
    outcome = (accepted[:, None] > np.arange(block_size)).astype(np.float64)  # [N, γ] y_k
    offsets = [_offset(z[accepted >= k, k], accepted[accepted >= k] > k) for k in range(block_size)]
    temperatures = _sequential_temperatures(z - offsets, outcome, grid)
    before, after = survivals(z), survivals(z, Scaling(temperatures, offsets))
    return Calibration(
        exactness=exactness,
        temperature_bucket=temperature_bucket(temperature),
        block_size=block_size,
        temperatures=temperatures,
        offsets=offsets,
        dataset=dataset,
        sample_count=len(z),
        ece_before=_per_position(expected_calibration_error, before, outcome),
        ece_after=_per_position(expected_calibration_error, after, outcome),
        auc=[None if np.isnan(area) else area for area in _per_position(area_under_roc, after, outcome)],
        wrong_side_share=[_wrong_side_share(z[:, k], accepted, k) for k in range(block_size)],
    )


def _offset(z: FloatArray, accepted: npt.NDArray[Any]) -> float:
    """The logit at which drafts of one position are accepted half of the time: Platt's σ(a·z + b), -b/a.

    Fitted by Newton's method, with a prior that holds a near 1 and b near 0 until some dozens of rounds say
    otherwise. 0 where acceptance does not rise with z.
    """
    x = np.stack([z, np.ones_like(z)], axis=1)
    start = np.array([1.0, 0.0])
    weights = start.copy()
    for _ in range(_NEWTON_STEPS):
        p = confidences(x @ weights)
        gradient = x.T @ (p - accepted) + _PRIOR_ROUNDS * (weights - start)
        curvature = (x * (p * (1 - p))[:, None]).T @ x + _PRIOR_ROUNDS * np.eye(2)
        weights = weights - np.linalg.solve(curvature, gradient)
    slope, bias = weights
    return float(-bias / slope) if slope > _LEAST_SLOPE else 0.0


def _sequential_temperatures(z: FloatArray, outcome: FloatArray, grid: Sequence[float]) -> list[float]:
    # Among equally good temperatures the one nearest to 1 changes least; sorted() keeps that order for min().
    candidates = sorted(grid, key=lambda t: abs(np.log(t)))
    chosen: list[float] = []
    prefix = np.ones(len(z))
    for k in range(z.shape[1]):
        errors = [
            expected_calibration_error(prefix * confidences(z[:, k] / t), outcome[:, k]) for t in candidates
        ]
        best = candidates[int(np.argmin(errors))]
        chosen.append(best)
        prefix = prefix * confidences(z[:, k] / best)
    return chosen


def _wrong_side_share(z: FloatArray, accepted: npt.NDArray[Any], k: int) -> float:
    """Share of the rounds that reach slot k whose bin of σ(z) accepts on the other side of .5."""
    reached = accepted >= k
    if not reached.any():
        return 0.0
    predicted = confidences(z[reached])
    counts, _, sum_observed = _bin_sums(predicted, (accepted[reached] > k).astype(np.float64), ECE_BINS)
    observed = sum_observed / np.maximum(counts, 1)
    above = np.arange(ECE_BINS) >= ECE_BINS // 2
    wrong = np.where(above, observed < 0.5, observed > 0.5)
    return float(counts[wrong].sum() / len(predicted))


def _per_position(measure: Any, predicted: FloatArray, outcome: FloatArray) -> list[float]:
    return [measure(predicted[:, k], outcome[:, k]) for k in range(predicted.shape[1])]


def _paired(predicted: npt.ArrayLike, outcome: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    p = np.asarray(predicted, dtype=np.float64).ravel()
    y = np.asarray(outcome, dtype=np.float64).ravel()
    if p.shape != y.shape:
        raise ConfigError(f"predictions and outcomes differ in number: {p.size} and {y.size}")
    return p, y


def _bin_sums(p: FloatArray, y: FloatArray, bins: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    index = np.minimum((p * bins).astype(np.int64), bins - 1)
    counts = np.bincount(index, minlength=bins).astype(np.float64)
    sum_predicted, sum_observed = np.bincount(index, p, bins), np.bincount(index, y, bins)
    return counts, sum_predicted.astype(np.float64), sum_observed.astype(np.float64)
