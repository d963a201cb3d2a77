"""Membership by the reader's clock, and the scheduler's decisions over several replicas and models."""

from itertools import pairwise

import pytest
from helpers import bins, drafter, verifier

from dspark_ray.config import ControlConfig
from dspark_ray.control.brain import ClusterBrain
from dspark_ray.control.membership import Rates, SampleBook, calibration_drift
from dspark_ray.protocol import LoadSample

CONTROL = ControlConfig(queue_max_requests=8)


def test_a_replica_lives_as_long_as_its_samples_change() -> None:
    book = SampleBook(lifetime_s=5.0)
    for tick in range(50):
        alive = verifier("alive", sequence=tick, uptime_s=-3600.0 + tick)  # a writer's clock that is far off
        frozen = verifier("frozen", sequence=min(tick, 10), uptime_s=1e9)
        died = book.observe([alive, frozen], tick * 0.2)
        assert died == (["frozen"] if tick == 36 else [])
    assert list(book.members) == ["alive"]


def test_an_outage_of_the_store_kills_nobody() -> None:
    book = SampleBook(lifetime_s=5.0)
    book.observe([verifier(sequence=1)], 0.0)
    assert book.observe([], 600.0) == [], "ten minutes without a successful read"
    assert book.observe([verifier(sequence=2)], 601.0) == []
    assert "v0" in book.members


def test_rates_over_the_window_and_after_a_restart() -> None:
    book = SampleBook(lifetime_s=5.0, window_s=2.0)
    for i in range(40):
        sample = verifier(sequence=i, rounds=10 * i, tokens_verified=40 * i, tokens_accepted=30 * i,
                          tokens_committed=40 * i, draft_calls=10 * i, deadline_misses=i)  # fmt: skip
        book.observe([sample], i * 0.2)
    rates = book.members["v0"].rates()
    assert rates.seconds == pytest.approx(2.0, abs=0.21)
    assert rates.tokens_per_s == pytest.approx(200.0)
    assert (rates.accept_len, rates.verify_len, rates.waste) == pytest.approx((4.0, 4.0, 0.25))
    assert rates.miss_share == pytest.approx(0.1)
    late = verifier(sequence=9, rounds=1, tokens_verified=5, tokens_accepted=0, tokens_committed=10)
    seldom = Rates.between(verifier(), late)
    assert seldom.verify_len == 0.5, "one full round among ten steps is no verify length of 5"
    book.observe([verifier(sequence=1, uptime_s=0.1)], 8.0)
    assert book.members["v0"].rates().tokens_per_s == 0.0, "counters that start anew give no negative rate"
    assert Rates.between(verifier(), verifier()) == Rates()


def test_drift_is_what_chance_cannot_explain() -> None:
    def drift(predicted: float, accepted: float, count: int = 1000) -> float | None:
        return calibration_drift(bins(0, 0, 0), bins(count, predicted, accepted))

    assert drift(0.8, 0.79) == 0.0
    assert drift(0.8, 0.5) == pytest.approx(0.3, abs=0.03)
    assert drift(0.5, 0.8) == pytest.approx(0.3, abs=0.04), "too modest is drift as well"
    assert drift(0.8, 0.5, count=50) is None


def ticks(brain: ClusterBrain, samples: list[LoadSample], start: int, count: int) -> dict[str, float]:
    """Run some ticks with the same loads, fresh sequence numbers; the taus last published."""
    taus: dict[str, float] = {}
    for i in range(start, start + count):
        fresh = [
            LoadSample(
                **{f: getattr(s, f) for f in s.__struct_fields__} | {"sequence": i, "uptime_s": 0.2 * i}
            )
            for s in samples
        ]
        decisions = brain.tick(fresh, 0.2 * i)
        taus |= {name: policy.tau for name, policy in decisions.policies.items()}
    return taus


def test_tau_follows_load_of_its_own_model_only() -> None:
    brain = ClusterBrain(CONTROL, 5.0)
    idle = ticks(brain, [verifier("a", model="busy"), verifier("b", model="idle")], 0, 5)
    assert idle == {"a": CONTROL.tau_min, "b": CONTROL.tau_min}
    busy = verifier("a", model="busy", requests_waiting=12, kv_blocks_used=100)
    loaded = ticks(brain, [busy, verifier("b", model="idle")], 5, 5)
    assert loaded["a"] > 0.9 * CONTROL.tau_max
    assert loaded["b"] == CONTROL.tau_min
    after = ticks(brain, [verifier("a", model="busy"), verifier("b", model="idle")], 10, 80)
    assert after["a"] == pytest.approx(CONTROL.tau_min, abs=2e-3)


def test_a_replica_shares_its_models_load_and_the_queue_in_serve() -> None:
    brain = ClusterBrain(CONTROL, 5.0)
    taus = ticks(brain, [verifier("full", requests_waiting=8), verifier("empty")], 0, 20)
    assert CONTROL.tau_min < taus["empty"] < taus["full"]
    queued = ClusterBrain(CONTROL, 5.0)
    ingress = LoadSample(role="ingress", model="m", replica="i", sequence=0, requests_running=24)
    replicas = [verifier(name, requests_running=4) for name in ("x", "y")]
    assert (
        ticks(queued, [*replicas, ingress], 0, 20)["x"]
        > ticks(ClusterBrain(CONTROL, 5.0), replicas, 0, 20)["x"]
    )


def test_policies_are_renewed_before_they_expire_and_go_with_their_replica() -> None:
    brain = ClusterBrain(CONTROL, sample_lifetime_s=2.0)
    published = []
    for i in range(60):
        decisions = brain.tick([verifier(sequence=min(i, 30))], 0.2 * i)
        published += [0.2 * i] if decisions.policies else []
        if decisions.dead:
            assert decisions.dead == ["v0"]
            assert 8.0 < 0.2 * i < 8.5
            break
    else:
        pytest.fail("the replica never died")
    gaps = [b - a for a, b in pairwise(published)]
    assert max(gaps) < CONTROL.policy_lifetime_s / 2
    assert len(published) < 20, "an unchanged policy is not written at each tick"


def test_a_new_scheduler_goes_on_where_the_last_one_stood() -> None:
    first = ClusterBrain(CONTROL, 5.0)
    first.rule(7, {})
    busy = verifier(requests_waiting=8, kv_blocks_used=80)
    ticks(first, [busy, verifier("gone")], 0, 20)
    policies = first.tick([verifier(sequence=99, requests_waiting=8, kv_blocks_used=80)], 8.0).policies
    second = ClusterBrain(CONTROL, 5.0)
    second.rule(8, {**policies, "gone": policies["v0"]})
    decisions = second.tick([verifier(sequence=100, kv_blocks_used=80)], 500.0)
    assert decisions.policies["v0"].tau > 0.8 * policies["v0"].tau, "not from zero"
    assert (decisions.policies["v0"].epoch, decisions.policies["v0"].version) > (7, 10**6)
    buried = [second.tick([verifier(sequence=101 + i)], 500.2 + i).dead for i in range(8)]
    assert ["gone"] in buried, "a policy whose replica never came back is removed"


def test_routes_name_live_drafters_by_weight() -> None:
    brain = ClusterBrain(CONTROL, 1.0)
    for i in range(10):
        pool = [drafter("d0", sequence=i, slots_used=20), drafter("d1", sequence=0 if i > 2 else i)]
        routes = brain.tick([verifier(sequence=i), *pool], 0.2 * i).routes["m"]
        if i == 2:
            assert [r.replica for r in routes] == ["d1", "d0"], "the empty one first"
            assert routes[0].endpoint == "tcp://d1"
    assert [(r.replica, r.weight) for r in routes] == [("d0", 1.0)], "the silent one is gone"


def test_a_drifting_drafter_is_named_and_its_verify_length_bounded() -> None:
    brain = ClusterBrain(CONTROL, 5.0)
    seen = {}
    for i in range(40):
        sample = verifier(sequence=i, rounds=50 * i, tokens_accepted=40 * i, tokens_verified=200 * i,
                          calibration=bins(200 * i, 0.9, 0.2))  # fmt: skip
        decisions = brain.tick([sample], 0.2 * i)
        seen |= decisions.policies
    assert decisions.drifting["v0"] > 0.5
    assert seen["v0"].max_verify_len == 2
