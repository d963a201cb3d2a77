"""The store against a real Redis: round trips, lifetimes, bounds, the fenced lease, pooled knowledge."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from helpers import Clock, drafter, verifier

from dspark_ray.config import ControlConfig, TelemetryConfig
from dspark_ray.control.brain import ClusterBrain
from dspark_ray.control.connection import Backoff, client_factory
from dspark_ray.control.knowledge import calibration_key, merge_step_costs, step_cost_key
from dspark_ray.control.ruling import Ruler
from dspark_ray.control.telemetry import STORE_ERRORS, TelemetryStore
from dspark_ray.errors import ConfigError
from dspark_ray.protocol import DrafterRoute, LoadSample, RoundRecord, SizingDecision, StepCost, VerifyPolicy

CONTROL = ControlConfig(tick_interval_s=0.05, lease_lifetime_s=0.3)
TELEMETRY = TelemetryConfig(
    key_prefix="test", sample_lifetime_s=2.0, history_samples=100, calibration_rounds=100
)


@pytest.fixture
def store(redis_url: str) -> TelemetryStore:
    return TelemetryStore(redis_url, TELEMETRY, CONTROL)


@pytest.fixture
def raw(redis_url: str) -> Iterator["redis.Redis"]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def policy(version: int = 1, epoch: int = 1, tau: float = 0.4) -> VerifyPolicy:
    return VerifyPolicy(epoch=epoch, version=version, tau=tau, lifetime_s=3.0)


def test_a_sample_is_one_round_trip_and_brings_the_policy_back(
    store: TelemetryStore, raw: "redis.Redis"
) -> None:
    assert store.push(verifier()) is None
    lease = store.acquire("a")
    assert lease is not None
    route = DrafterRoute("d0", "tcp://d0", 1.0)
    assert store.publish(lease, {"v0": policy()}, {"m": (route,)})
    reads = int(raw.info("stats")["total_reads_processed"])
    held = store.push(verifier(sequence=2), [RoundRecord((0.1, -2.0), 2, 1, 0.0)])
    assert int(raw.info("stats")["total_reads_processed"]) - reads <= 2, (
        "one for the push, one for this question"
    )
    assert held == VerifyPolicy(epoch=1, version=1, tau=0.4, lifetime_s=3.0, drafters=(route,))
    assert store.samples() == [verifier(sequence=2)]
    assert store.rounds("m", 10) == [RoundRecord((0.1, -2.0), 2, 1, 0.0)]
    assert [s.sequence for _, s in store.history("m", 10)] == [1, 2]


def test_every_key_has_the_prefix_and_a_lifetime(store: TelemetryStore, raw: "redis.Redis") -> None:
    lease = store.acquire("a")
    assert lease is not None
    store.push(verifier(step_cost=StepCost((1,), (0.1,))), [RoundRecord((0.1,), 1, 1, 0.0)])
    store.publish(lease, {"v0": policy()}, {"m": ()})
    store.pool_step_cost("k", StepCost((1,), (0.1,)))
    store.share_calibration("k", b"{}")
    store.put_sizing({"verifier": SizingDecision("m", "verifier", 1, 2, "queue")})
    keys = raw.keys("*")
    assert len(keys) == 10, keys
    assert all(key.startswith(b"{test}:") for key in keys)
    assert [k for k in keys if raw.pttl(k) <= 0 and not k.endswith(b":epoch")] == []


def test_history_and_rounds_are_bounded(store: TelemetryStore, raw: "redis.Redis") -> None:
    for i in range(30):
        store.push(verifier(sequence=i), [RoundRecord((0.1,), 1, 1, 0.0)] * 20)
    assert raw.xlen("{test}:rounds:m") <= 300, "trimmed in whole nodes"
    for i in range(400):
        store.push(verifier(sequence=i))
    assert raw.xlen("{test}:history:m") <= 200


def test_dead_names_leave_the_index(store: TelemetryStore, raw: "redis.Redis") -> None:
    store.push(verifier("gone"))
    store.push(verifier("here"))
    raw.delete("{test}:sample:gone")
    assert [s.replica for s in store.samples()] == ["here"]
    assert raw.smembers("{test}:replicas") == {b"here"}
    raw.delete("{test}:sample:here")
    assert store.samples() == []


def test_a_strangers_sample_does_not_blind_the_scheduler(store: TelemetryStore, raw: "redis.Redis") -> None:
    store.push(verifier())
    raw.sadd("{test}:replicas", "odd")
    raw.set("{test}:sample:odd", b"\x81\xa4role\xa4king", px=5000)
    assert [s.replica for s in store.samples()] == ["v0"]


def test_thousands_of_replicas_in_one_publication(redis_url: str) -> None:
    patient = CONTROL.model_copy(update={"lease_lifetime_s": 60.0})
    store = TelemetryStore(redis_url, TELEMETRY.model_copy(update={"sample_lifetime_s": 60.0}), patient)
    names = [f"r{i}" for i in range(2100)]
    for name in names:
        store.push(verifier(name))
    assert len(store.samples()) == 2100
    lease = store.acquire("a")
    assert lease is not None
    assert store.publish(lease, {name: policy() for name in names}, {})
    assert len(store.policies()) == 2100
    assert store.publish(lease, {}, {}, gone=names[:2099])
    assert list(store.policies()) == ["r2099"]


# --- the lease


def test_one_rules_and_a_deposed_scheduler_writes_nothing(store: TelemetryStore) -> None:
    first = store.acquire("first")
    assert first is not None
    assert store.acquire("second") is None
    assert store.publish(first, {"v0": policy(tau=0.3)}, {})
    time.sleep(CONTROL.lease_lifetime_s + 0.1)  # the first one hangs
    second = store.acquire("second")
    assert second is not None
    assert second.epoch > first.epoch
    assert store.publish(second, {"v0": policy(epoch=second.epoch, tau=0.6)}, {})
    assert not store.publish(first, {"v0": policy(version=9, tau=0.3)}, {}, gone=["v0"]), "fenced"
    assert store.policies()["v0"].tau == 0.6
    store.release(first)
    assert store.lease() == second, "a deposed one cannot give away what it lost"
    store.release(second)
    assert store.acquire("first") is not None


def test_an_epoch_is_fenced_also_from_its_own_successor(store: TelemetryStore) -> None:
    before = store.acquire("a")
    again = store.acquire("a")
    assert before is not None
    assert again is not None
    assert not store.publish(before, {"v0": policy()}, {})
    assert store.publish(again, {}, {})


def test_publishing_keeps_the_lease(store: TelemetryStore) -> None:
    lease = store.acquire("a")
    assert lease is not None
    for _ in range(6):
        time.sleep(CONTROL.lease_lifetime_s / 3)
        assert store.publish(lease, {}, {})
    assert store.acquire("b") is None


def test_epochs_rise_across_flushall(store: TelemetryStore, raw: "redis.Redis") -> None:
    first = store.acquire("a")
    assert first is not None
    raw.flushall()
    raw.script_flush()
    assert not store.publish(first, {"v0": policy()}, {}), "whoever comes first rules, not the one before"
    again = store.acquire("b")
    assert again is not None
    assert again.epoch > first.epoch
    raw.flushall()
    far = store.acquire("c", last_epoch=10**15)
    assert far is not None
    assert far.epoch > 10**15, "also where the server's clock went back"


def test_two_rulers_take_turns_and_the_second_continues(redis_url: str) -> None:
    clock = Clock()

    def ruler(name: str) -> Ruler:
        store = TelemetryStore(redis_url, TELEMETRY, CONTROL)
        return Ruler(store, ClusterBrain(CONTROL, 5.0), name, clock)

    replica = TelemetryStore(redis_url, TELEMETRY, CONTROL)
    one, two = ruler("one"), ruler("two")
    seen: list[VerifyPolicy] = []
    for i in range(10):
        if i == 5:
            time.sleep(CONTROL.lease_lifetime_s + 0.1)  # both hang; the second one wakes first
            two.step()
        replica.push(verifier(sequence=i, requests_waiting=64, kv_blocks_used=90))
        clock.advance(1.0)
        one.step()
        two.step()
        assert (one.ruling, two.ruling) == ((True, False) if i < 5 else (False, True))
        held = replica.push(verifier(sequence=i, requests_waiting=64, kv_blocks_used=90))
        assert held is not None
        seen.append(held)
    stamps = [(p.epoch, p.version) for p in seen]
    assert stamps == sorted(stamps)
    assert len({p.epoch for p in seen}) == 2
    assert min(p.tau for p in seen[4:]) > 0.6, "the second one did not start from an idle cluster"
    two.resign()
    assert one.step() is not None


# --- pooled knowledge


def test_step_costs_are_pooled_and_refined(store: TelemetryStore) -> None:
    key = step_cost_key("m", "cpu", {"dtype": "bfloat16", "tp": 1})
    assert key == step_cost_key("m", "cpu", {"tp": 1, "dtype": "bfloat16"})
    assert key != step_cost_key("m", "cpu", {"tp": 2, "dtype": "bfloat16"})
    assert store.step_cost(key) is None
    store.pool_step_cost(key, StepCost((1, 4), (0.010, 0.016), weight=30))
    store.pool_step_cost(key, StepCost((2, 8), (0.018, 0.03), weight=10))
    pooled = store.step_cost(key)
    assert pooled is not None
    assert pooled.tokens == (1, 2, 4, 8)
    assert pooled.seconds == pytest.approx(
        (0.010, (0.012 * 30 + 0.018 * 10) / 40, (0.016 * 30 + 0.022 * 10) / 40, 0.03)
    )
    assert pooled.weight == 40


def test_a_pooled_curve_keeps_following_a_changed_machine() -> None:
    pooled = StepCost((1, 2), (0.01, 0.01), weight=1e9)
    for _ in range(100):
        pooled = merge_step_costs(pooled, StepCost((1, 2), (0.02, 0.02), weight=100))
    assert pooled.seconds[0] > 0.019


def test_a_calibration_is_shared_for_the_very_files_that_it_refines(
    store: TelemetryStore, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    key = calibration_key(tmp_path)
    assert store.calibration(key) is None
    store.share_calibration(key, b"{}")
    assert store.calibration(calibration_key(tmp_path)) == b"{}"
    (tmp_path / "calibration.json").write_text("{}")
    assert store.calibration(calibration_key(tmp_path)) is None, "a newer file is not overruled"


def test_sizing_decisions_are_remembered(store: TelemetryStore) -> None:
    decision = SizingDecision("m", "verifier", 1, 2, "queue 9 over 4")
    store.put_sizing({"VerifierServer:m": decision})
    assert store.sizing() == {"VerifierServer:m": decision}


# --- connecting


def test_urls_of_every_kind() -> None:
    for url in (
        "redis://user:s3cret@host:6380/2",
        "rediss://host?ssl_ca_certs=/ca.pem",
        "unix:///tmp/socket",
        "redis+cluster://:s3cret@a:1,b:2",
        "rediss+sentinel://user:s3cret@a:26379,b/mymaster/3?health_check_interval=5",
    ):
        assert callable(client_factory(url, 1.0))
    client = client_factory("redis+sentinel://user:s3cret@a:1,[::1]:2/mymaster/3", 0.5)()
    options = client.connection_pool.connection_kwargs
    assert options["username"] == "user"
    assert options["password"] == "s3cret"
    assert (options["db"], options["socket_timeout"]) == (3, 0.5)
    nodes = client.connection_pool.sentinel_manager.sentinels
    assert [n.connection_pool.connection_kwargs["host"] for n in nodes] == ["a", "::1"]


@pytest.mark.parametrize(
    "url",
    [
        "host:6379",
        "http://:s3cret@x",
        "redis://:s3cret@h:port",
        "redis+sentinel://:s3cret@h/",
        "redis+cluster://:s3cret@",
    ],
)
def test_a_bad_url_is_named_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="Redis URL") as caught:
        client_factory(url, 1.0)
    assert "s3cret" not in str(caught.value)


def test_a_dead_redis_fails_fast_and_comes_back_without_a_new_store() -> None:
    store = TelemetryStore("redis://127.0.0.1:1", TelemetryConfig(timeout_s=0.2), CONTROL)
    start = time.monotonic()
    for call in (store.samples, lambda: store.push(drafter()), lambda: store.acquire("a")):
        with pytest.raises(STORE_ERRORS):
            call()
    assert time.monotonic() - start < 1.5


def test_pauses_grow_are_jittered_and_bounded() -> None:
    import random

    backoff = Backoff(0.2, 2.0, random.Random(1))
    pauses = [backoff.failed() for _ in range(8)]
    assert 0.1 <= pauses[0] <= 0.2
    assert all(1.0 <= p <= 2.0 for p in pauses[5:])
    assert len(set(pauses)) == 8
    backoff.succeeded()
    assert backoff.failed() <= 0.2


def test_samples_of_other_versions_are_read(store: TelemetryStore, raw: "redis.Redis") -> None:
    import msgspec

    newer = msgspec.msgpack.encode(
        {"role": "verifier", "model": "m", "replica": "n", "sequence": 3, "invented_later": [1, 2]}
    )
    raw.sadd("{test}:replicas", "n")
    raw.set("{test}:sample:n", newer, px=5000)
    assert store.samples() == [LoadSample(role="verifier", model="m", replica="n", sequence=3)]
