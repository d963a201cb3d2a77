"""From an engine's counters and its worker's statistics to a sample, and from a policy to the worker."""

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dspark_ray.config import SchedulingConfig
from dspark_ray.control.agent import ActivePolicy
from dspark_ray.control.knowledge import Pooled
from dspark_ray.control.membership import calibration_drift
from dspark_ray.decoding.calibration import Calibration, CalibrationTable
from dspark_ray.errors import ConfigError
from dspark_ray.protocol import (
    DrafterRoute,
    LoadSample,
    RoundRecord,
    SpeculationSetting,
    StepCost,
    TargetControl,
)
from dspark_ray.serving.calibration_tally import CalibrationTally
from dspark_ray.serving.engine_report import QUIET_REPORTS, UNBOUNDED_VERIFY_LEN, EngineReport
from dspark_ray.serving.telemetry import ReplicaIdentity

ROUTE = DrafterRoute("d0", "tcp://d0", 1.0)
POLICY = ActivePolicy(tau=0.3, max_verify_len=None, drafters=(ROUTE,), load=0.2, epoch=1, local=False)


class Engine:
    """What the engine client and its workers do with a collective call: rank 1 has nothing to say."""

    def __init__(self) -> None:
        self.controls: list[TargetControl] = []
        self.shim: dict[str, Any] = {"steps": 0, "verify_ms": 0.0, "full_rounds": []}
        self.step = {"tokens": [1, 2], "milliseconds": [10.0, 12.0], "observed": 5}

    async def rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "dspark_control":
            self.controls.append(msgspec.msgpack.decode(args[0], type=TargetControl))
            return [None, None]
        assert method == "dspark_stats"
        client = {"calls": 7, "deadline_misses": 1}
        return [None, msgspec.msgpack.encode({"shim": self.shim, "client": client, "step": self.step})]


def report(engine: Engine, role: Any = "verifier", **options: Any) -> EngineReport:
    counters = SimpleNamespace(
        requests_running=2, requests_waiting=3, requests_max=4, kv_blocks_used=5, kv_blocks_total=10,
        tokens_generated=99, ttft_s=0.5,
    )  # fmt: skip
    identity = ReplicaIdentity(role, "m", "v0", "n0", "Verifier:m")
    return EngineReport(identity, counters, engine.rpc, has_shim=True, **options)


async def test_a_sample_carries_the_engines_and_the_workers_numbers() -> None:
    engine = Engine()
    engine.shim |= {"rounds": 4, "tokens_drafted": 20, "tokens_verified": 16, "tokens_accepted": 9}
    sample, rounds = await report(engine, queued=lambda: 6).collect(POLICY)
    assert isinstance(sample, LoadSample)
    assert (sample.requests_running, sample.requests_waiting, sample.requests_queued) == (2, 3, 6)
    assert (sample.tokens_wasted, sample.tokens_committed, sample.deadline_misses) == (7, 99, 1)
    assert sample.deployment == "Verifier:m"
    assert rounds == []


async def test_an_idle_engine_is_left_alone_until_something_happens() -> None:
    engine, asked = Engine(), []
    reporter = report(engine)
    rpc, reporter._rpc = reporter._rpc, lambda method, **_: asked.append(method) or rpc(method, **_)
    counters = reporter._counters
    counters.requests_running = 0
    engine.shim["full_rounds"] = [RoundRecord((0.0,), 1, 1, 0.0)]
    counted = [len((await reporter.collect(POLICY))[1]) for _ in range(3 * QUIET_REPORTS)]
    assert asked.count("dspark_stats") == QUIET_REPORTS
    assert counted == [1] * QUIET_REPORTS + [0] * 2 * QUIET_REPORTS, "no round is told twice"
    counters.tokens_generated += 1
    engine.shim["steps"] = 9
    await reporter.collect(POLICY)
    assert reporter.worker["shim"]["steps"] == 9
    asked.clear()
    counters.requests_running = 1
    for _ in range(3 * QUIET_REPORTS):
        await reporter.collect(POLICY)
    assert asked.count("dspark_stats") == 3 * QUIET_REPORTS, "one at work is asked each time"


async def test_step_time_is_the_mean_of_the_steps_since_the_last_report() -> None:
    engine = Engine()
    reporter = report(engine)
    await reporter.collect(POLICY)
    engine.shim |= {"steps": 10, "verify_ms": 300.0, "draft_wait_ms": 100.0}
    assert (await reporter.collect(POLICY))[0].step_time_s == pytest.approx(0.04)
    assert (await reporter.collect(POLICY))[0].step_time_s == pytest.approx(0.04), (
        "no step since: the last one"
    )
    engine.shim |= {"steps": 20, "verify_ms": 400.0}
    assert (await reporter.collect(POLICY))[0].step_time_s == pytest.approx(0.01)


async def test_the_step_curve_is_sent_when_it_has_moved() -> None:
    engine = Engine()
    reporter = report(engine)
    first = (await reporter.collect(POLICY))[0].step_cost
    assert first is not None
    assert first.seconds == (0.010, 0.012)
    engine.step["milliseconds"] = [10.4, 12.4]
    assert (await reporter.collect(POLICY))[0].step_cost is None
    engine.step["milliseconds"] = [10.4, 15.0]
    assert (await reporter.collect(POLICY))[0].step_cost is not None


async def test_the_worker_is_told_what_changed_once_and_a_lifted_cap_too() -> None:
    engine = Engine()
    reporter = report(engine)
    capped = ActivePolicy(tau=0.5, max_verify_len=2, drafters=(ROUTE,), load=0.2, epoch=1, local=True)
    for policy in (POLICY, POLICY, capped, POLICY):
        await reporter.collect(policy)
    assert [c.max_verify_len for c in engine.controls] == [UNBOUNDED_VERIFY_LEN, 2, UNBOUNDED_VERIFY_LEN]
    assert [c.tau for c in engine.controls] == [0.3, 0.5, 0.3]


async def test_an_operators_setting_comes_before_policy_and_configuration() -> None:
    """At once and until it is taken back: policies go on coming meanwhile."""
    engine = Engine()
    reporter = report(engine, scheduling=SchedulingConfig(mode="tau", fixed_tau=0.4, fixed_len=3))
    await reporter.collect(POLICY)
    for setting, said in [
        (SpeculationSetting(mode="off"), {"mode": "off", "tau": 0.3}),
        (SpeculationSetting(mode="fixed_tau"), {"mode": "fixed_tau", "tau": 0.4}),
        (SpeculationSetting(mode="fixed_tau", tau=0.9), {"mode": "fixed_tau", "tau": 0.9}),
        (SpeculationSetting(mode="fixed_len", fixed_len=1), {"mode": "fixed_len", "tau": 0.3}),
        (SpeculationSetting(), {"mode": "tau", "tau": 0.3}),
    ]:
        assert await reporter.set_speculation(setting) == {"replica": "v0", **said}
        await reporter.collect(POLICY)
    seen = [(c.mode, c.tau, c.fixed_tau, c.fixed_len, c.max_verify_len) for c in engine.controls]
    unbounded = UNBOUNDED_VERIFY_LEN
    assert seen == [
        ("tau", 0.3, 0.4, 3, unbounded),
        ("tau", 0.3, 0.4, 3, 0),
        ("fixed_tau", 0.3, 0.4, 3, unbounded),
        ("fixed_tau", 0.9, 0.9, 3, unbounded),
        ("fixed_len", 0.3, 0.4, 1, unbounded),
        ("tau", 0.3, 0.4, 3, unbounded),
    ]


async def test_a_setting_without_a_drafter_is_refused() -> None:
    with pytest.raises(ConfigError, match="model m: no drafter"):
        await report(Engine(), role="prefill").set_speculation(SpeculationSetting(mode="off"))


async def test_without_a_policys_drafters_those_that_run_are_used() -> None:
    def running() -> tuple[DrafterRoute, ...]:
        return (DrafterRoute("d1", "tcp://d1", 1.0),)

    def none() -> tuple[DrafterRoute, ...]:
        return ()

    engine = Engine()
    bare = ActivePolicy(tau=0.3, max_verify_len=None, drafters=(), load=0.0, epoch=0, local=True)
    await report(engine, routes=running).collect(bare)
    await report(engine, routes=none).collect(bare)
    assert [c.drafters for c in engine.controls] == [(DrafterRoute("d1", "tcp://d1", 1.0),), None]


async def test_a_prefill_replica_obeys_nothing_and_a_stock_worker_is_not_asked() -> None:
    engine = Engine()
    await report(engine, role="prefill").collect(POLICY)
    assert engine.controls == []
    stock = report(engine)
    stock._has_shim = False
    stock._rpc = None  # type: ignore[assignment]
    sample, _ = await stock.collect(POLICY)
    assert sample.requests_running == 2


async def test_full_rounds_reach_the_log_and_the_bins() -> None:
    engine = Engine()
    record = RoundRecord((2.0, 0.0), 2, 1, 0.0)
    engine.shim["full_rounds"] = [record]
    sample, rounds = await report(engine).collect(POLICY)
    assert rounds == [record]
    assert sample.calibration is not None
    assert sum(sample.calibration.counts) == 2
    first = 1 / (1 + math.exp(-2.0))
    assert sum(sample.calibration.predicted) == pytest.approx(first + first / 2)
    assert sum(sample.calibration.accepted) == 1


def test_drift_is_measured_with_the_temperatures_in_use() -> None:
    """A drafter that is far too sure, and whose calibration knows it, does not drift."""
    rounds = [RoundRecord((4.0,), 1, int(i % 4 == 0), 0.0) for i in range(400)]

    def drift(table: CalibrationTable | None) -> float:
        tally = CalibrationTally(table)
        tally.count(rounds[:1])
        before = tally.bins()
        tally.count(rounds)
        after = tally.bins()
        assert before is not None
        assert after is not None
        measured = calibration_drift(before, after)
        assert measured is not None
        return measured

    assert drift(None) > 0.6
    fitted = Calibration.model_construct(
        exactness="coupled",
        temperature_bucket="greedy",
        block_size=1,
        temperatures=[-4.0 / math.log(3.0)],
        offsets=[],
    )
    table = CalibrationTable.model_construct(entries=[fitted])
    assert drift(table) < 0.02
    tally = CalibrationTally(table)
    tally.count([RoundRecord((4.0, 4.0), 2, 0, 0.0)] * 9)  # of another block size: the fit says nothing of it
    assert tally.bins() is None


def calibration(temperature: float) -> Calibration:
    one = [0.0]
    return Calibration(
        exactness="coupled", temperature_bucket="greedy", block_size=1, temperatures=[temperature], dataset="d",
        sample_count=9, ece_before=one, ece_after=one, auc=one, wrong_side_share=one,
    )  # fmt: skip


async def test_the_worker_goes_on_from_pooled_step_costs_once_and_takes_shared_calibrations() -> None:
    engine, found = Engine(), [Pooled()]
    reporter = report(engine, pooled=lambda: found[0])
    await reporter.collect(POLICY)
    curve = StepCost((1, 2), (0.020, 0.022), weight=6.0)
    table = CalibrationTable(entries=[calibration(2.0)])
    found[0] = Pooled(curve, table.model_dump_json().encode())
    for _ in range(3):
        await reporter.collect(POLICY)
    (learnt,) = [c for c in engine.controls if c.step_cost is not None]
    assert learnt.step_cost.seconds == pytest.approx((0.015, 0.017)), "weighed by the steps behind each"
    assert learnt.calibration == found[0].calibration
    assert (learnt.tau, learnt.drafters) == (None, None)
    newer = CalibrationTable(entries=[calibration(3.0)]).model_dump_json().encode()
    for shared in (b"nonsense", newer, None):
        found[0] = Pooled(curve, shared)
        await reporter.collect(POLICY)
    told = [c for c in engine.controls if c.calibration is not None]
    assert [c.calibration for c in told] == [found[0].calibration or learnt.calibration, newer]
    assert reporter._bins._scaling(RoundRecord((1.0,), 1, 1, 0.0)).temperatures == [3.0]
