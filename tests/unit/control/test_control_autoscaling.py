"""The co-scaling policy: reasons and sizes of the three roles, and the adapter to Serve's signature."""

from types import SimpleNamespace
from typing import Any

import pytest
from helpers import drafter, verifier
from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.common import DeploymentID
from ray.serve.autoscaling_policy import _apply_app_level_autoscaling_config
from ray.serve.config import AutoscalingConfig

from dspark_ray.config import AutoscalingTargets
from dspark_ray.control.autoscaling import RoleSize, RoleTelemetry, size_model, summarise
from dspark_ray.control.membership import SampleBook
from dspark_ray.protocol import Role
from dspark_ray.serving.autoscaling import RoleSizer

TARGETS = AutoscalingTargets()
IDLE = RoleTelemetry(reporting=1, seats=4, slots=64, tau=0.2)


def wanted(
    tau_max: float | None = 0.75, targets: AutoscalingTargets = TARGETS, **roles: RoleSize
) -> dict[Role, tuple[int, str]]:
    return {r: (d.wanted, d.reason) for r, d in size_model("m", roles, targets, tau_max).items()}  # type: ignore[arg-type]


def verifiers(target: int = 1, serve: float = 0.0, **fields: Any) -> RoleSize:
    base = {"reporting": target, "seats": 4.0, "tau": 0.75, "tokens_per_s": 100.0}
    return RoleSize(target, serve, RoleTelemetry(**{**base, **fields}))


def test_idle_roles_go_to_zero_and_leave_the_minimum_to_serve() -> None:
    sizes = wanted(verifier=verifiers(), prefill=RoleSize(1, 0, IDLE), drafter=RoleSize(1, 0, IDLE))
    assert sizes == dict.fromkeys(("verifier", "prefill", "drafter"), (0, "idle"))


def test_verifiers_follow_seats_queue_in_serve_and_kv() -> None:
    assert wanted(verifier=verifiers(running=4, waiting=5))["verifier"][0] == 3
    assert wanted(verifier=verifiers(running=4, serve=16.0))["verifier"][0] == 5, "queued at handles"
    size, reason = wanted(verifier=verifiers(2, running=3, kv_share=0.99))["verifier"]
    assert size == 3
    assert "KV 99% used" in reason


def test_raising_tau_comes_first_but_only_while_latency_holds() -> None:
    pressed = {"running": 4, "waiting": 5, "tau": 0.4, "ttft_s": 0.5}
    size, reason = wanted(verifier=verifiers(**pressed))["verifier"]
    assert size == 1
    assert "tau 0.40 rises first" in reason
    assert wanted(verifier=verifiers(**{**pressed, "tau": 0.75}))["verifier"][0] == 3, "tau has no room left"
    assert wanted(tau_max=None, verifier=verifiers(**pressed))["verifier"][0] == 3, "tau does not follow load"
    size, reason = wanted(verifier=verifiers(**{**pressed, "ttft_s": 2.5}))["verifier"]
    assert size == 3
    assert "TTFT 2.50 s over 2 s" in reason
    size, reason = wanted(verifier=verifiers(**{**pressed, "tokens_per_s": 20.0}))["verifier"]
    assert size == 3
    assert "200 ms a token" in reason


def test_missed_latency_with_a_queue_adds_a_verifier_even_when_seats_are_free() -> None:
    assert wanted(verifier=verifiers(2, running=4, waiting=1, ttft_s=3.0))["verifier"][0] == 3
    assert wanted(verifier=verifiers(2, running=4, waiting=0, ttft_s=3.0))["verifier"][0] == 2


def test_a_replica_goes_only_when_the_rest_has_room() -> None:
    assert wanted(verifier=verifiers(2, running=3))["verifier"][0] == 2, "3 of 3.2 seats on one is too tight"
    assert wanted(verifier=verifiers(2, running=2))["verifier"][0] == 1
    assert wanted(verifier=verifiers(3, running=1, kv_share=0.8))["verifier"][0] == 3, "KV would not fit"


def test_no_telemetry_changes_nothing() -> None:
    silent = RoleSize(3, 50.0, RoleTelemetry())
    sizes = wanted(verifier=silent, prefill=silent, drafter=silent)
    assert {size for size, _ in sizes.values()} == {3}
    assert {reason for _, reason in sizes.values()} == {"no telemetry: unchanged"}


def test_without_telemetry_serves_own_count_sizes_what_serve_counts() -> None:
    silent = RoleSize(2, 50.0, RoleTelemetry(), serve_target=10.0)
    sizes = wanted(verifier=silent, prefill=silent, drafter=silent)
    assert (sizes["verifier"][0], sizes["prefill"][0], sizes["drafter"][0]) == (5, 5, 2)
    assert "Serve counts 50 requests" in sizes["verifier"][1]
    quiet = RoleSize(3, 0.0, RoleTelemetry(), serve_target=10.0)
    assert wanted(verifier=quiet)["verifier"][0] == 1, (
        "but not to zero: it may be busy with what is streaming"
    )


def test_drafters_follow_slots_misses_and_the_verifiers_to_come() -> None:
    pool = {"reporting": 1, "slots": 8.0}
    busy = verifiers(running=4, waiting=8)
    coming = wanted(verifier=busy, drafter=RoleSize(1, 0, RoleTelemetry(slots_used=4, **pool)))
    assert coming["verifier"][0] == 4
    assert coming["drafter"][0] == 2, (
        "4 slots now and 8 more requests: scaled together, not one after the other"
    )
    alone = wanted(
        verifier=verifiers(2, running=4), drafter=RoleSize(1, 0, RoleTelemetry(slots_used=4, **pool))
    )
    assert alone["drafter"][0] == 1
    late = RoleTelemetry(slots_used=4, miss_share=0.2, **pool)
    size, reason = wanted(verifier=verifiers(2, running=4), drafter=RoleSize(1, 0, late))["drafter"]
    assert size == 2
    assert "20% of the calls late" in reason
    seen = verifiers(2, running=4, miss_share=0.2)  # the verifiers count the calls that came too late
    punctual = RoleTelemetry(slots_used=4, **pool)
    size, reason = wanted(verifier=seen, drafter=RoleSize(1, 0, punctual))["drafter"]
    assert size == 2
    assert "20% of the calls late" in reason
    assert wanted(verifier=verifiers(running=1), drafter=RoleSize(0, 0, RoleTelemetry()))["drafter"][0] == 1
    nearly_late = RoleTelemetry(reporting=2, slots=8.0, slots_used=1, miss_share=0.045)
    assert wanted(verifier=verifiers(running=1), drafter=RoleSize(2, 0, nearly_late))["drafter"][0] == 2


def test_prefill_follows_prompts_and_ttft_and_wakes_with_the_verifiers() -> None:
    queue = RoleTelemetry(reporting=1, running=1, waiting=4)
    assert wanted(prefill=RoleSize(1, 0, queue))["prefill"][0] == 3
    slow = RoleTelemetry(reporting=3, running=1, waiting=4, ttft_s=9.0)
    assert wanted(prefill=RoleSize(3, 0, slow))["prefill"][0] == 4
    assert wanted(verifier=verifiers(running=1), prefill=RoleSize(0, 0, RoleTelemetry()))["prefill"][0] == 1
    assert wanted(verifier=verifiers(running=1), prefill=RoleSize(1, 0, IDLE))["prefill"][0] == 1


@pytest.mark.parametrize(
    ("fixed", "target", "pool", "expected"),
    [
        (RoleTelemetry(reporting=2, running=3), 0, RoleTelemetry(), 1),
        (RoleTelemetry(reporting=2, running=3), 3, RoleTelemetry(), 3),
        (RoleTelemetry(reporting=2), 3, IDLE, 0),
        (RoleTelemetry(reporting=2, running=3, miss_share=0.2), 1, IDLE, 2),
        (None, 3, RoleTelemetry(), 3),
        (None, 0, RoleTelemetry(), 0),
        (None, 2, IDLE, 1),
    ],
)
def test_a_pool_beside_fixed_verifiers_follows_what_they_report(
    fixed: RoleTelemetry | None, target: int, pool: RoleTelemetry, expected: int
) -> None:
    roles: dict[Role, RoleSize] = {"drafter": RoleSize(target, 0, pool)}
    decision = size_model("m", roles, TARGETS, None, fixed)["drafter"]
    assert decision.wanted == expected, decision.reason


def test_prefill_beside_fixed_verifiers_goes_to_zero_only_when_they_are_known_to_be_idle() -> None:
    roles: dict[Role, RoleSize] = {"prefill": RoleSize(1, 0, IDLE)}
    for fixed, expected in ((RoleTelemetry(reporting=1, running=1), 1), (None, 1), (IDLE, 0)):
        assert size_model("m", roles, TARGETS, None, fixed)["prefill"].wanted == expected


counts = st.integers(0, 200)
telemetries = st.builds(
    RoleTelemetry,
    reporting=st.integers(0, 5),
    running=counts,
    waiting=counts,
    seats=st.sampled_from([0.0, 4.0, 16.0]),
    kv_share=st.floats(0, 1),
    ttft_s=st.floats(0, 100),
    tokens_per_s=st.floats(0, 1e4),
    slots_used=counts,
    slots=st.sampled_from([0.0, 8.0, 64.0]),
    miss_share=st.floats(0, 1),
    tau=st.floats(0, 1),
)
role_sizes = st.builds(
    RoleSize, target=st.integers(0, 6), serve_requests=st.floats(0, 500), telemetry=telemetries
)


@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys(("prefill", "drafter", "verifier"), role_sizes)),
    st.none() | telemetries,
)
def test_any_telemetry_gives_a_size_and_a_reason(
    roles: dict[Role, RoleSize], fixed: RoleTelemetry | None
) -> None:
    decisions = size_model("m", roles, TARGETS, 0.75, fixed)
    assert decisions.keys() == roles.keys()
    assert all(0 <= d.wanted < 10_000 and d.reason for d in decisions.values())


@given(telemetries, counts, st.integers(1, 6))
def test_more_waiting_never_means_fewer_verifiers(now: RoleTelemetry, more: int, target: int) -> None:
    import dataclasses

    loaded = dataclasses.replace(now, waiting=now.waiting + more)
    few = size_model("m", {"verifier": RoleSize(target, 0, now)}, TARGETS, None)["verifier"].wanted
    many = size_model("m", {"verifier": RoleSize(target, 0, loaded)}, TARGETS, None)["verifier"].wanted
    assert many >= few


def test_summaries_add_up_replicas() -> None:
    book = SampleBook(5.0)
    for i in range(2):
        book.observe(
            [
                verifier("a", sequence=i, requests_running=4, requests_waiting=2, requests_max=4,
                         kv_blocks_used=30, ttft_s=1.0, tau=0.4, tokens_committed=20 * i),
                verifier("b", sequence=i, requests_running=2, requests_max=4, kv_blocks_used=10, tau=0.2,
                         tokens_committed=10 * i),
            ],
            0.2 * i,
        )  # fmt: skip
    summary = summarise(list(book.members.values()))
    assert (summary.reporting, summary.requests, summary.seats) == (2, 8, 4.0)
    assert (summary.kv_share, summary.ttft_s, summary.tau) == pytest.approx((0.2, 1.0, 0.3))
    assert summary.tokens_per_s == pytest.approx(150.0)
    assert summary.token_latency_s == pytest.approx(6 / 150)
    pool = SampleBook(5.0)
    pool.observe([drafter("d", slots_used=5), drafter("e", slots_used=1)], 0.0)
    summary = summarise(list(pool.members.values()))
    assert (summary.slots_used, summary.slots) == (6, 64)
    assert summarise([]) == RoleTelemetry()


# --- Serve's signature


def context(target: int, requests: float = 0.0, **bounds: Any) -> Any:
    config = AutoscalingConfig(
        **{"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 0, "downscale_delay_s": 0, **bounds}
    )
    return SimpleNamespace(
        current_num_replicas=target,
        target_num_replicas=target,
        total_num_requests=requests,
        policy_state={},
        config=config,
    )


def test_serve_applies_the_policy_with_its_own_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Serve's own wrapper of application-level policies, as its controller calls it."""
    monkeypatch.setattr(RoleSizer, "_ensure_thread", lambda self: None)
    sizer = RoleSizer(target_ttft_s=1.0)
    policy = _apply_app_level_autoscaling_config(sizer)
    ids = {role: DeploymentID(name=f"{role}:m", app_name="llm") for role in ("Verifier", "Drafter")}
    contexts = {
        ids["Verifier"]: context(1, 12.0, target_ongoing_requests=16),
        ids["Drafter"]: context(1, upscale_delay_s=60),
    }
    assert policy(contexts)[0] == {ids["Verifier"]: 1, ids["Drafter"]: 1}, (
        "nothing is known yet, and Serve is content"
    )
    sizer.take(
        {
            "Verifier:m": RoleTelemetry(reporting=1, seats=4, running=4, waiting=8, tau=0.75, ttft_s=3.0),
            "Drafter:m": RoleTelemetry(reporting=1, slots=4, slots_used=4),
        },
        0.75,
    )
    sizes, _ = policy(contexts)
    assert sizes[ids["Verifier"]] == 4, "Serve bounds it by max_replicas afterwards"
    assert sizes[ids["Drafter"]] == 1, "its upscale delay has just begun"
    assert sizer.decisions["Verifier:m"].wanted == 4
    assert sizer.decisions["Drafter:m"].wanted == 4
    assert "TTFT 3.00 s over 1 s" in sizer.decisions["Verifier:m"].reason


def test_fixed_verifiers_have_no_context_but_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoleSizer, "_ensure_thread", lambda self: None)
    sizer = RoleSizer()
    pool = DeploymentID(name="Drafter:m", app_name="llm")
    assert sizer({pool: context(2, min_replicas=0)})[0] == {pool: 2}, (
        "nobody says that the verifiers are idle"
    )
    sizer.take({"Verifier:m": RoleTelemetry(reporting=1, seats=4, running=1)}, None)
    assert sizer({pool: context(0, min_replicas=0)})[0] == {pool: 1}
    assert sizer({pool: context(2, min_replicas=0)})[0] == {pool: 2}
    sizer.take({"Verifier:m": RoleTelemetry(reporting=1, seats=4)}, None)
    assert sizer({pool: context(2, min_replicas=0)})[0] == {pool: 0}


def test_the_policy_never_waits_and_forgets_stale_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setattr(RoleSizer, "_ensure_thread", lambda self: None)
    sizer = RoleSizer()
    ids = DeploymentID(name="Verifier:m", app_name="llm")
    sizer.take({"Verifier:m": RoleTelemetry(reporting=1, seats=4, running=9, tau=0.75)}, 0.75)
    assert sizer({ids: context(1)})[0][ids] == 3
    sizer.take({}, None)
    assert sizer({ids: context(1)})[0][ids] == 3, "an empty answer is no answer"
    later = time.monotonic() + 60.0
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert sizer({ids: context(1)})[0][ids] == 1
    assert sizer.decisions["Verifier:m"].reason == "no telemetry: Serve counts 0 requests"


def test_deployment_names_and_unknown_targets() -> None:
    from pydantic import ValidationError

    from dspark_ray.serving import names
    from dspark_ray.serving.autoscaling import ROLE_OF_PREFIX

    assert {
        names.PREFILL_PREFIX.rstrip(":"): "prefill",
        names.DRAFTER_PREFIX.rstrip(":"): "drafter",
        names.VERIFIER_PREFIX.rstrip(":"): "verifier",
    } == ROLE_OF_PREFIX
    with pytest.raises(ValidationError, match="target_ttft"):
        RoleSizer(target_ttft=1.0)
