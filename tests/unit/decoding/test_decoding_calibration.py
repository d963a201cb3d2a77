"""Calibration: the measures on worked values, and that the fit finds temperatures it was not told."""

from pathlib import Path

import numpy as np
import pytest

from dspark_ray.decoding.calibration import (
    Calibration,
    CalibrationTable,
    Scaling,
    area_under_roc,
    confidences,
    expected_calibration_error,
    fit_calibration,
    reliability_bins,
    round_survivals,
    survivals,
    temperature_bucket,
)
from dspark_ray.errors import CheckpointError, ConfigError


def rounds(temperatures: list[float], count: int = 20_000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits whose true acceptance is σ(z_k / T_k), and how many drafts were accepted."""
    rng = np.random.default_rng(seed)
    z = rng.normal(1.5, 2.5, size=(count, len(temperatures)))
    accepted = rng.random(z.shape) < confidences(z, Scaling(temperatures, [0.0] * len(temperatures)))
    return z, np.cumprod(accepted, axis=1).sum(axis=1)


def fit(z: np.ndarray, verify_len: np.ndarray, accept_len: np.ndarray) -> Calibration:
    return fit_calibration(z, verify_len, accept_len, exactness="coupled", temperature=0.0, dataset="made up")


def test_ece_and_bins_on_worked_values():
    predicted, outcome = [0.02, 0.03, 0.52, 1.0], [0, 1, 1, 1]
    # Bin 0: |.05 - 1| over two, bin 10: |.52 - 1|, last bin: 1.0 belongs to it, no error. (.95 + .48) / 4.
    assert expected_calibration_error(predicted, outcome) == pytest.approx(0.3575)
    bins = reliability_bins(predicted, outcome)
    assert (bins.counts[0], bins.counts[10], bins.counts[19]) == (2, 1, 1)
    assert (bins.mean_predicted[0], bins.mean_observed[0]) == pytest.approx((0.025, 0.5))


def test_auc_counts_ties_half():
    assert area_under_roc([0.9, 0.5, 0.5, 0.1], [1, 1, 0, 0]) == pytest.approx(3.5 / 4)
    assert np.isnan(area_under_roc([0.9, 0.5], [1, 1]))


def test_survival_is_the_product_and_does_not_overflow():
    assert survivals([[1000.0, 0.0, -1000.0]]).tolist() == [[1.0, 0.5, 0.0]]
    assert survivals([2.0, 3.0], Scaling([2.0, 1.0], [0.0, 1.0]))[1] == pytest.approx(
        confidences(1.0) * confidences(2.0)
    )


def test_one_rounds_survivals_are_those_of_the_arrays():
    logits, scaling = [3.0, -0.5, 1000.0], Scaling([2.0, 0.7, 1.0], [0.5, -0.2, 0.0])
    for scaled in (None, scaling):
        assert round_survivals(logits, scaled) == pytest.approx(survivals(logits, scaled).tolist())


def test_sequential_scaling_finds_the_temperatures():
    true = [2.5, 1.0, 0.5, 4.0]
    z, accepted = rounds(true)
    found = fit(z, np.full(len(z), 4), accepted)
    # Later temperatures are seen through fewer surviving rounds, hence the width.
    assert np.log(found.temperatures) == pytest.approx(np.log(true), abs=0.25)
    assert max(found.ece_after) < 0.015
    assert max(found.ece_before) > 0.05
    assert all(area is not None and area > 0.7 for area in found.auc)


def test_a_head_that_is_sure_too_early_gets_offsets():
    """No temperature moves a confidence across .5; a drafter is surer of what it was trained on."""
    rng = np.random.default_rng(2)
    z = rng.normal(0.5, 2.0, size=(20_000, 2))
    accepted = np.cumprod(rng.random(z.shape) < confidences(z, Scaling([1.0, 1.0], [1.2, -0.4])), axis=1).sum(
        axis=1
    )
    found = fit(z, np.full(len(z), 2), accepted)
    assert found.offsets == pytest.approx([1.2, -0.4], abs=0.15)
    assert max(found.ece_after) < 0.012
    assert found.ece_before[0] > 0.05
    few = fit(z[:3], np.full(3, 2), accepted[:3])
    assert max(map(abs, few.offsets)) < 0.5, "three rounds say little"


def test_truncated_rounds_do_not_count():
    z, accepted = rounds([1.5, 0.7], count=2000)
    full = fit(z, np.full(len(z), 2), accepted)
    # Truncation that follows confidence, as scheduling does, would bias every label it hides.
    cut = np.full(1000, 1)
    both = fit(
        np.concatenate([z, z[:1000]]),
        np.concatenate([np.full(len(z), 2), cut]),
        np.concatenate([accepted, np.minimum(accepted[:1000], 1)]),
    )
    assert both == full
    with pytest.raises(ConfigError, match="full_round_share"):
        fit(z[:1000], cut, accepted[:1000])


def test_what_no_temperature_can_mend_is_reported():
    rng = np.random.default_rng(1)
    z = np.stack([rng.uniform(0.2, 3, 4000), rng.uniform(0.2, 3, 4000)], axis=1)
    accepted = np.where(rng.random(4000) < 0.3, 0, 1)  # slot 1 holds 7 times in 10, slot 2 never
    found = fit(z, np.full(4000, 2), accepted)
    assert found.wrong_side_share[0] < 0.05
    assert found.wrong_side_share[1] == 1.0


def test_temperatures_are_looked_up_by_mode_block_size_and_nearest_bucket(tmp_path: Path):
    def entry(bucket: str, block_size: int, t: float) -> Calibration:
        values = [0.0] * block_size
        return Calibration(
            exactness="coupled",
            temperature_bucket=bucket,
            block_size=block_size,
            temperatures=[t] * block_size,
            dataset="d",
            sample_count=1,
            ece_before=values,
            ece_after=values,
            auc=[None] * block_size,
            wrong_side_share=values,
        )

    table = CalibrationTable(
        entries=[entry("greedy", 2, 1.5), entry("medium", 2, 3.0), entry("greedy", 3, 9.0)]
    )
    table.save(tmp_path)
    loaded = CalibrationTable.load(tmp_path)
    assert loaded == table
    assert loaded.scaling_for("coupled", 0.0, 2) == Scaling([1.5, 1.5], [0.0, 0.0])
    assert loaded.scaling_for("coupled", 1.7, 2).temperatures == [3.0, 3.0]
    assert loaded.scaling_for("coupled", 0.0, 5) is None  # another γ' has other hidden states
    assert loaded.scaling_for("ratio", 0.0, 2) is None
    with pytest.raises(ValueError, match="two calibrations"):
        CalibrationTable(entries=[entry("low", 2, 1.0), entry("low", 2, 2.0)])
    (tmp_path / "sts.json").write_text('{"entries": [{"temperatures": [0]}]}')
    with pytest.raises(CheckpointError, match=r"sts\.json"):
        CalibrationTable.load(tmp_path)
    assert CalibrationTable.load(tmp_path / "elsewhere") is None


@pytest.mark.parametrize(
    ("temperature", "bucket"), [(0, "greedy"), (0.5, "low"), (0.7, "medium"), (1.0, "medium")]
)
def test_temperature_buckets(temperature: float, bucket: str):
    assert temperature_bucket(temperature) == bucket
