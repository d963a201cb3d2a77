"""Load, smoothing and tau: the spec's values, monotonicity, hysteresis, the goodput search."""

import pytest
from helpers import verifier
from hypothesis import given
from hypothesis import strategies as st

from dspark_ray.config import ControlConfig
from dspark_ray.control.load import SmoothedLoad, blended_load, guide_load, replica_load
from dspark_ray.control.membership import Rates
from dspark_ray.control.policy import GoodputSearch, ReplicaControl, decide_tau, guide_tau, verify_cap

CONTROL = ControlConfig()
unit = st.floats(0, 1)


@pytest.mark.parametrize(("load", "tau"), [(0.0, 0.25), (0.5, 0.375), (1.0, 0.75)])
def test_guide_values_of_the_spec(load: float, tau: float) -> None:
    assert guide_tau(load, 0.25, 0.75) == pytest.approx(tau)


def test_load_clips_each_term_and_weighs_them() -> None:
    assert guide_load(32, 64, 0.5) == pytest.approx(0.6 * 0.5 + 0.4 * 0.5)
    assert guide_load(640, 64, 0.0) == pytest.approx(0.6), "an endless queue saturates its own term only"
    assert guide_load(0, 64, 7.0) == pytest.approx(0.4)


def test_replica_load_counts_every_queue_and_kv_blocks() -> None:
    sample = verifier(requests_waiting=8, requests_queued=4, requests_running=99, kv_blocks_used=50)
    control = ControlConfig(queue_max_requests=32)
    assert replica_load(sample, control, queued_in_serve=4) == pytest.approx(0.6 * 16 / 32 + 0.4 * 0.5)
    device_full = verifier(device_memory_used_bytes=100, device_memory_total_bytes=100)
    assert replica_load(device_full, control) == 0.0, "vLLM reserves device memory up front: it says nothing"


@given(st.lists(st.tuples(unit, unit, st.floats(0, 2)), min_size=1, max_size=30), unit)
def test_more_load_never_lowers_tau(steps: list[tuple[float, float, float]], start: float) -> None:
    """Of two replicas with the same past, the one that had more load all along has no lower tau."""
    low = ReplicaControl(SmoothedLoad.starting_at(start))
    high = ReplicaControl(SmoothedLoad.starting_at(start))
    now = 0.0
    for load, extra, seconds in steps:
        now += seconds
        tau_low = low.step(now, load, CONTROL)
        tau_high = high.step(now, min(1.0, load + extra), CONTROL)
        assert tau_high >= tau_low - 1e-12
        assert CONTROL.tau_min <= tau_low <= CONTROL.tau_max


@given(unit, unit, unit, unit)
def test_blended_load_is_monotone_and_bounded(own: float, more: float, mean: float, weight: float) -> None:
    low, high = sorted((own, more))
    assert blended_load(low, mean, weight) <= blended_load(high, mean, weight) + 1e-12
    assert min(own, mean) - 1e-12 <= blended_load(own, mean, weight) <= max(own, mean) + 1e-12


def run(control: ReplicaControl, loads: list[float], interval_s: float = 0.2) -> list[float]:
    start = control.stepped_at_s or 0.0
    return [control.step(start + (i + 1) * interval_s, load, CONTROL) for i, load in enumerate(loads)]


def test_up_within_a_second_down_slower_and_back_to_the_minimum() -> None:
    control = ReplicaControl(SmoothedLoad.starting_at(0.0))
    rise = run(control, [1.0] * 6)
    assert rise[4] >= CONTROL.tau_min + 0.9 * (CONTROL.tau_max - CONTROL.tau_min), "1 s after the load came"
    fall = run(control, [0.0] * 60)
    risen = SmoothedLoad.starting_at(0.0).step(1.0, 0.2, CONTROL).held
    fallen = 1.0 - SmoothedLoad.starting_at(1.0).step(0.0, 0.2, CONTROL).held
    assert fallen < risen / 4, "down is slower than up"
    assert fall[-1] == pytest.approx(CONTROL.tau_min, abs=1e-3)


def test_small_ripples_do_not_move_tau() -> None:
    control = ReplicaControl(SmoothedLoad.starting_at(0.8))
    taus = run(control, [0.8, 0.77, 0.8, 0.76, 0.8, 0.78] * 5)
    assert max(taus) - min(taus) < 1e-9
    without = ControlConfig(load_hysteresis=0.0)
    plain = ReplicaControl(SmoothedLoad.starting_at(0.8))
    rippling = [plain.step(0.2 * i, load, without) for i, load in enumerate([0.8, 0.7] * 10)]
    assert max(rippling) - min(rippling) > 1e-3, "hysteresis is what holds it still"


def test_fixed_tau_ignores_load() -> None:
    control = ControlConfig(policy="fixed_tau", fixed_tau=0.35)
    assert decide_tau(0.0, 0.0, control) == decide_tau(1.0, 0.3, control) == 0.35


@given(unit, st.floats(-1, 1))
def test_goodput_stays_in_bounds_and_starts_at_the_guide(load: float, offset: float) -> None:
    control = ControlConfig(policy="goodput")
    assert control.tau_min <= decide_tau(load, offset, control) <= control.tau_max
    assert decide_tau(load, 0.0, control) == decide_tau(load, 0.0, ControlConfig())


@pytest.mark.parametrize("best", [0.35, 0.5])
def test_goodput_finds_the_best_tau_of_a_plant(best: float) -> None:
    """Acceptance rises with tau all the way, tokens per second do not: it must end at the latter's best."""
    control = ControlConfig(policy="goodput", goodput_span=0.3)
    search, load, now = GoodputSearch(), 0.5, 0.0
    taus = []
    for _ in range(60):
        tau = decide_tau(load, search.offset, control)
        taus.append(tau)
        now += control.goodput_period_s
        rates = Rates(tokens_per_s=100.0 * (1.0 - 4.0 * (tau - best) ** 2))
        search = search.step(now, rates, 8, control)
    late = taus[-20:]
    assert abs(sum(late) / len(late) - best) < 1.5 * control.goodput_step


def test_goodput_does_not_blame_tau_for_fewer_requests() -> None:
    control = ControlConfig(policy="goodput")
    search = GoodputSearch(direction=1, started_at_s=0.0, last_goodput=100.0, last_running=8)
    fewer = search.step(control.goodput_period_s, Rates(tokens_per_s=25.0), 2, control)
    assert fewer.direction == 1
    same = search.step(control.goodput_period_s, Rates(tokens_per_s=25.0), 8, control)
    assert same.direction == -1
    idle = GoodputSearch(offset=0.2, started_at_s=0.0)
    assert idle.step(control.goodput_period_s, Rates(), 0, control).offset == pytest.approx(0.1)


def test_a_restart_goes_on_from_the_published_policy() -> None:
    for policy in ("guide", "goodput"):
        control = ControlConfig(policy=policy)
        published = decide_tau(0.7, 0.1 if policy == "goodput" else 0.0, control)
        resumed = ReplicaControl.resumed(0.7, published, control)
        assert resumed.step(0.0, 0.7, control) == pytest.approx(published)


def test_out_of_calibration_the_verify_length_is_capped_by_what_was_accepted() -> None:
    assert verify_cap(2.4, CONTROL) == 3
    assert verify_cap(0.0, CONTROL) == 1
    assert verify_cap(2.4, ControlConfig(max_verify_len=2)) == 2
