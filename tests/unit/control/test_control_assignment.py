"""Weights of drafters for new requests."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_ray.control.assignment import DrafterPicker, DrafterState, drafter_weights

states = st.builds(
    DrafterState,
    requests=st.integers(0, 80),
    slots_total=st.sampled_from([0, 16, 64]),
    speed=st.floats(0, 500),
    miss_share=st.floats(0, 1),
)


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=3), states, min_size=1, max_size=6))
def test_weights_are_shares(drafters: dict[str, DrafterState]) -> None:
    weights = drafter_weights(drafters)
    assert weights.keys() == drafters.keys()
    assert all(w >= 0 for w in weights.values())
    assert sum(weights.values()) == pytest.approx(1.0)


def simulate(drafters: dict[str, DrafterState], arrivals: int, weights_every: int = 4) -> dict[str, int]:
    """Requests held after `arrivals` new ones, weights renewed now and then as by the scheduler."""
    held = {name: state.requests for name, state in drafters.items()}
    picker = DrafterPicker()
    weights: dict[str, float] = {}
    for i in range(arrivals):
        if i % weights_every == 0:
            now = {
                n: DrafterState(held[n], s.slots_total, s.speed, s.miss_share) for n, s in drafters.items()
            }
            weights = drafter_weights(now)
        held[picker.pick(weights) or ""] += 1
    return held


def test_a_drafter_that_joins_catches_up_and_running_requests_stay() -> None:
    held = simulate({"old": DrafterState(20, 64, 100), "new": DrafterState(0, 64, 100)}, 24)
    assert held["old"] >= 20, "nothing is moved away"
    assert abs(held["old"] - held["new"]) <= 3


def test_a_drafter_twice_as_fast_carries_twice_as_many() -> None:
    held = simulate({"slow": DrafterState(0, 0, 50), "fast": DrafterState(0, 0, 100)}, 90)
    assert held["fast"] / held["slow"] == pytest.approx(2.0, rel=0.15)


def test_full_and_late_drafters_get_less() -> None:
    weights = drafter_weights({"full": DrafterState(64, 64, 900), "open": DrafterState(60, 64, 1)})
    assert weights == {"full": 0.0, "open": 1.0}
    both_full = drafter_weights({"a": DrafterState(64, 64, 1), "b": DrafterState(64, 64, 1)})
    assert both_full == {"a": 0.5, "b": 0.5}
    late = drafter_weights({"ok": DrafterState(4, 64, 100), "late": DrafterState(4, 64, 100, 0.5)})
    assert late["late"] < late["ok"]


def test_an_unmeasured_drafter_counts_as_typical() -> None:
    weights = drafter_weights({"new": DrafterState(0, 64, 0), "known": DrafterState(0, 64, 7.0)})
    assert weights["new"] == pytest.approx(weights["known"])


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=5), st.floats(0, 0.99))
def test_the_picker_follows_weights_within_one_request(weights: list[float], start: float) -> None:
    shares = {f"d{i}": w / sum(weights) for i, w in enumerate(weights)}
    picker = DrafterPicker(start)
    picked: Counter[str | None] = Counter()
    for n in range(1, 61):
        picked[picker.pick(shares)] += 1
        for name, share in shares.items():
            assert abs(picked[name] - n * share) <= 2.0, "also inside a burst"


def test_the_picker_avoids_the_unreachable_unless_there_is_no_other() -> None:
    picker = DrafterPicker()
    assert {picker.pick({"a": 0.9, "b": 0.1}, avoid=["a"]) for _ in range(9)} == {"b"}
    assert picker.pick({"a": 1.0}, avoid=["a"]) == "a"
    assert picker.pick({}) is None
    assert {DrafterPicker(start).pick({"a": 0.5, "b": 0.5}) for start in (0.0, 0.6)} == {"a", "b"}
