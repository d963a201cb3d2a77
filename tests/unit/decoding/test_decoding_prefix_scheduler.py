"""Verify lengths: the worked values of dspark-spec.md section 4, and properties that always hold."""

import itertools
import logging
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_ray.decoding import prefix_scheduler
from dspark_ray.decoding.prefix_scheduler import StepCurve, admit_top, schedule, throughput_budget
from dspark_ray.errors import ConfigError

A = [[0.9, 0.72], [0.5, 0.25]]


def curve(rates: dict[int, float]) -> StepCurve:
    return StepCurve(tuple(rates), tuple(1000.0 / rate for rate in rates.values()))


SMOOTH = curve({2: 1.0, 3: 0.95, 4: 0.9, 5: 0.8, 6: 0.7})
CLIFF = curve({2: 1.0, 3: 0.65, 4: 0.65, 5: 0.65, 6: 0.65})


def expected_rate(
    lengths: list[int], survivals: list[list[float]], steps: StepCurve, extra: int = 0
) -> float:
    tokens = sum(lengths) + len(lengths)
    expected = len(lengths) + sum(sum(row[:n]) for row, n in zip(survivals, lengths, strict=True))
    return expected * steps.steps_per_second(tokens + extra)


def test_algorithm_1_worked():
    assert schedule(A, mode="throughput", step_curve=SMOOTH) == [2, 1]
    assert expected_rate([2, 1], A, SMOOTH) == pytest.approx(3.296)


def test_algorithm_1_stops_at_a_cliff_that_the_budget_crosses():
    assert schedule(A, mode="throughput", step_curve=CLIFF) == [0, 0]
    budget = throughput_budget(A, CLIFF)
    lengths = schedule(A, mode="throughput", step_curve=CLIFF, budget=budget)
    assert (budget, lengths) == (4, [2, 2])
    assert expected_rate(lengths, A, CLIFF) == pytest.approx(2.8405)


@pytest.mark.parametrize(
    ("survival", "tau", "at_least", "expected"),
    [([0.9, 0.72, 0.5, 0.3], 0.375, 0, 3), ([0.1], 0.25, 1, 1), ([0.1], 0.25, 0, 0), ([0.25], 0.25, 0, 1)],
)
def test_threshold_worked(survival: list[float], tau: float, at_least: int, expected: int):
    assert schedule([survival], mode="tau", tau=tau, min_verify_len=at_least) == [expected]
    # The minimum belongs to mode tau alone.
    without = expected if at_least == 0 else 0
    assert schedule([survival], mode="fixed_tau", tau=tau, min_verify_len=at_least) == [without]


def test_fixed_len_and_bounds_of_each_request():
    rows = [[0.9] * 5, [0.9] * 2, []]
    assert schedule(rows, mode="fixed_len") == [5, 2, 0]
    assert schedule(rows, mode="fixed_len", fixed_len=3, max_len=[2, 9, 9]) == [2, 2, 0]
    assert schedule(rows, mode="tau", tau=1.0, min_verify_len=4, max_len=[-1, 1, 0]) == [0, 1, 0]


def test_both_together_take_the_smaller():
    assert schedule(A, mode="tau+throughput", tau=0.8, step_curve=SMOOTH) == [1, 0]
    assert schedule(A, mode="tau+throughput", tau=0.1, step_curve=SMOOTH) == [2, 1]


def test_prefill_in_the_same_step_is_paid_for():
    steps = StepCurve((1, 8, 9, 20), (1.0, 1.05, 4.0, 5.0))
    assert schedule([[0.9] * 4], mode="throughput", step_curve=steps) == [4]
    assert schedule([[0.9] * 4], mode="throughput", step_curve=steps, extra_tokens=7) == [0]


@pytest.mark.parametrize("mode", ["throughput", "tau+throughput"])
def test_a_flat_or_missing_curve_warns_and_leaves_tau_in_charge(mode, caplog: pytest.LogCaptureFixture):
    prefix_scheduler._warn_of_flat_curve.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):  # built anew every few steps, but said once
            flat = StepCurve((1, 2, 64), (10.0, 10.1, 10.2))
    assert [("flat" in record.message) for record in caplog.records] == [True]
    for steps in (flat, None):
        assert schedule(A, mode=mode, tau=0.6, step_curve=steps) == [2, 0]


def test_a_curve_interpolates_time_and_goes_on_along_its_last_slope():
    steps = StepCurve((2, 4, 8), (10.0, 12.0, 20.0))
    assert [steps.milliseconds(b) for b in (1, 2, 3, 4, 6, 8, 10)] == [10, 10, 11, 12, 16, 20, 24]
    falling = StepCurve((2, 4, 6), (10.0, 12.0, 11.0))
    assert falling.milliseconds(8) == 11.0


@pytest.mark.parametrize(
    ("sizes", "times"),
    [((), ()), ((2, 2), (1.0, 2.0)), ((0,), (1.0,)), ((1, 2), (1.0,)), ((1,), (float("nan"),))],
)
def test_a_curve_that_cannot_be_is_refused(sizes: tuple[int, ...], times: tuple[float, ...]):
    with pytest.raises(ConfigError, match="step curve"):
        StepCurve(sizes, times)


ROWS = st.lists(
    st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]), max_size=3).map(lambda c: np.cumprod(c).tolist()),
    min_size=1,
    max_size=4,
)
CURVES = st.lists(st.integers(0, 6), min_size=13, max_size=13).map(
    lambda steps: StepCurve(tuple(range(1, 14)), tuple(4.0 + s for s in itertools.accumulate(steps)))
)


@given(ROWS, CURVES, st.integers(0, 3))
def test_the_budget_is_the_global_optimum(rows: list[list[float]], steps: StepCurve, extra: int):
    lengths = admit_top(rows, throughput_budget(rows, steps, extra))
    best = max(
        expected_rate(list(choice), rows, steps, extra)
        for choice in itertools.product(*(range(len(row) + 1) for row in rows))
    )
    assert expected_rate(lengths, rows, steps, extra) == pytest.approx(best)


@given(ROWS, st.integers(0, 14))
def test_a_budget_is_spent_exactly_also_when_survivals_tie(rows: list[list[float]], budget: int):
    lengths = admit_top(rows, budget)
    assert sum(lengths) == min(budget, sum(map(len, rows)))
    assert all(n <= len(row) for n, row in zip(lengths, rows, strict=True))
    admitted = [row[n - 1] for row, n in zip(rows, lengths, strict=True) if n]
    waiting = [row[n] for row, n in zip(rows, lengths, strict=True) if n < len(row)]
    assert not admitted or not waiting or min(admitted) >= max(waiting)


def test_ties_go_by_position_then_request():
    assert admit_top([[1.0] * 3] * 3, 4) == [2, 1, 1]


@given(ROWS, CURVES, st.integers(0, 2), st.data())
def test_lengths_are_causal(rows: list[list[float]], steps: StepCurve, request_index: int, data):
    """ℓ_r ≥ k does not depend on survivals after slot k: those depend on tokens that ℓ_r ≥ k decides on."""
    row = request_index % len(rows)
    k = data.draw(st.integers(0, len(rows[row])))
    if k == 0:
        return
    changed = [list(r) for r in rows]
    last = changed[row][k - 1]
    changed[row][k:] = [last * data.draw(st.sampled_from([0.0, 0.5, 1.0])) for _ in changed[row][k:]]
    for mode in ("throughput", "tau+throughput", "fixed_tau"):
        before = schedule(rows, mode=mode, tau=0.3, step_curve=steps)
        after = schedule(changed, mode=mode, tau=0.3, step_curve=steps)
        assert (before[row] >= k) == (after[row] >= k)


def test_arrays_nan_and_rising_rows_do_no_harm():
    rows = [np.array([0.9, np.nan, 0.9], dtype=np.float32), np.array([0.2, 0.9])]
    assert schedule(rows, mode="fixed_tau", tau=0.5) == [1, 0]
    assert sum(schedule(rows, mode="throughput", step_curve=SMOOTH, budget=2)) == 2


def test_the_verifiers_worker_gets_it_without_torch():
    code = "import sys, dspark_ray.decoding.prefix_scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
