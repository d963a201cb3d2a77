"""Clients that leave at any moment leave nothing behind, in no engine and in no drafter."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from serving_harness import RunningApp, wait_until

PREFILL, VERIFIER, DRAFTER = "Prefill:smollm2", "Verifier:smollm2", "Drafter:smollm2"
GAUGES = ("requests_queued", "requests_waiting", "requests_running", "kv_usage")


def left_behind(app: RunningApp) -> dict[str, Any]:
    """What is not at its idle value."""
    left = {}
    for name in (PREFILL, VERIFIER):
        stats = app.stats(name)
        left |= {f"{name} {gauge}": stats.get(gauge) for gauge in GAUGES}
        left[f"{name} contexts"] = stats["workers"].get("requests")
    for one in app.all_stats(DRAFTER):
        left[f"slots {one['endpoint']}"] = one["slots_used"]
    return {what: value for what, value in left.items() if value}


def ask_and_leave(app: RunningApp, number: int, dice: random.Random) -> str:
    """One request that its client leaves; says how far it came."""
    stream = dice.random() < 0.7
    body = {
        "model": "smollm2", "prompt": f"{number} " + "word " * dice.randrange(1, 400), "max_tokens": 300,
        "ignore_eos": True, "stream": stream,
    }  # fmt: skip
    patience_s = dice.choice([0.02, 0.1, 0.4, 1.0, 2.0]) * dice.random()
    if stream and dice.random() < 0.5:
        patience_s = 60.0  # leaves after some tokens
    tokens = dice.randrange(40)
    began = time.monotonic()
    try:
        with httpx.stream(
            "POST", f"{app.base_url}/v1/completions", json=body, timeout=patience_s
        ) as response:
            assert response.status_code == 200, response.read()
            for count, _ in enumerate(response.iter_lines()):
                if count > tokens or time.monotonic() - began > patience_s:
                    return "in mid-stream"
    except httpx.TimeoutException:
        return "before the first byte"
    return "at the end"


@pytest.mark.parametrize(
    "count", [40, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])], ids=str
)
def test_aborted_requests_leave_nothing_behind(app: RunningApp, count: int) -> None:
    wait_until(lambda: not left_behind(app), 30, "idle before the test")
    came: dict[str, int] = {}
    lock, dice = threading.Lock(), random.Random(count)
    seeds = [dice.random() for _ in range(count)]

    def one(number: int) -> None:
        how = ask_and_leave(app, number, random.Random(seeds[number]))
        with lock:
            came[how] = came.get(how, 0) + 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(count)))
    outcomes = app.stats(VERIFIER)["remote_prefills"]
    print(f"left {came}; remote prefills {outcomes}")
    assert came["before the first byte"] > count / 10
    assert came["in mid-stream"] > count / 10
    began = time.monotonic()
    while left := left_behind(app):
        # Well before the lease of prefilled blocks that nobody fetches would end, after 30 s.
        assert time.monotonic() - began < 10, left
    print(f"idle {time.monotonic() - began:.2f} s after the last one left")
