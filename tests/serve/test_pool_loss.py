"""The drafter pool of the running application: found, killed, stopped, and never missed by a client."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from serving_harness import RunningApp, running_app, wait_until

pytestmark = pytest.mark.slow  # an application of their own
VERIFIER, DRAFTER = "Verifier:smollm2", "Drafter:smollm2"
QUESTIONS = ("Count from one to thirty.", "Name the months of the year.", "Say the alphabet.")


@pytest.fixture(scope="module")
def app(demo_model: Path, app_args: dict[str, Any]) -> Iterator[RunningApp]:
    """The first model of the shared application, with two drafters."""
    model = app_args["models"][0]
    with running_app({"models": [model | {"drafter": model["drafter"] | {"replicas": 2}}]}) as app:
        yield app


@pytest.fixture
def pool(app: RunningApp) -> Iterator[RunningApp]:
    """The application with both drafters up, verifying every draft."""
    wait_until(lambda: len(routes(app)) == 2, 120, "two drafters listed")
    app.speculate("fixed_len")
    yield app
    app.speculate()


def routes(app: RunningApp) -> list[list[Any]]:
    return app.drill(Path(__file__).with_name("drills.py"), "drafters_listed", "smollm2")


def shim(app: RunningApp) -> dict[str, Any]:
    return app.stats(VERIFIER)["workers"]["shim"]


@contextmanager
def traffic(app: RunningApp, streams: int = 4) -> Iterator[list[Any]]:
    """Clients that ask without a pause; yields what came back: a text for each question, or an exception."""
    client, outcomes, stop = app.client(), [], threading.Event()

    def ask(worker: int) -> None:
        turn = worker
        while not stop.is_set():
            turn += 1
            question = QUESTIONS[turn % len(QUESTIONS)]
            try:
                answer = client.completions.create(
                    model="smollm2",
                    prompt=question,
                    max_tokens=48,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
                outcomes.append((question, answer.choices[0].text))
            except Exception as error:
                outcomes.append((question, error))

    workers = [threading.Thread(target=ask, args=(worker,)) for worker in range(streams)]
    for worker in workers:
        worker.start()
    try:
        wait_until(lambda: len(outcomes) >= 2 * streams, 120, "first answers")
        yield outcomes
    finally:
        stop.set()
        for worker in workers:
            worker.join()


def check_answers(outcomes: list[Any]) -> None:
    """None failed, and each question has one answer, whatever happened around it."""
    assert [answer for _, answer in outcomes if not isinstance(answer, str)] == []
    assert len(set(outcomes)) == len(QUESTIONS)


def tokens_per_round(app: RunningApp, seconds: float) -> float:
    """Accept length over some time, steps without drafts included."""
    before = shim(app)
    time.sleep(seconds)
    after = shim(app)
    committed, accepted = (after[name] - before[name] for name in ("tokens_committed", "tokens_accepted"))
    return committed / (committed - accepted) if committed > accepted else 0.0


def time_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    began = time.monotonic()
    wait_until(condition, timeout_s, what, every_s=0.01)
    return time.monotonic() - began


def test_the_directory_lists_every_drafter_that_runs(pool: RunningApp) -> None:
    listed = routes(pool)
    running = pool.all_stats(DRAFTER)
    assert sorted(endpoint for _, endpoint, _ in listed) == sorted(one["endpoint"] for one in running)
    assert [weight for _, _, weight in listed] == [1.0, 1.0]
    assert all(endpoint.startswith("tcp://127.0.0.1:") for _, endpoint, _ in listed), "no secret is set"


def test_a_killed_drafter_engine_fails_nothing_and_acceptance_comes_back(pool: RunningApp) -> None:
    app = pool
    with traffic(app) as outcomes:
        usual = tokens_per_round(app, 2.0)
        assert usual > 1.2
        victim = max(app.all_stats(DRAFTER), key=lambda one: one["slots_used"])
        assert victim["slots_used"] > 0
        os.kill(victim["engine_pid"], signal.SIGKILL)
        back_s = time_until(lambda: tokens_per_round(app, 0.3) > 0.9 * usual, 15, "acceptance as before")
        print(f"accept length {usual:.2f}; {back_s:.2f} s after the kill it was back")
        before = len(outcomes)
        wait_until(lambda: len(outcomes) >= before + 8, 60, "answers after the kill")
    check_answers(outcomes)

    def restarted() -> bool:
        return all(one["engine_pid"] != victim["engine_pid"] for one in app.all_stats(DRAFTER))

    wait_until(restarted, 120, "the engine's restart by Ray")
    assert sorted(route[1] for route in routes(app)) == sorted(
        one["endpoint"] for one in app.all_stats(DRAFTER)
    )
    with traffic(app):
        wait_until(lambda: all(one["slots_used"] for one in app.all_stats(DRAFTER)), 30, "both draft again")


def test_a_drafter_engine_that_hangs_is_started_anew(pool: RunningApp) -> None:
    app = pool
    restarts = sum(one["restarts"] for one in app.all_stats(DRAFTER))
    victim = app.all_stats(DRAFTER)[0]["engine_pid"]
    with traffic(app) as outcomes:
        os.kill(victim, signal.SIGSTOP)
        try:
            wait_until(
                lambda: sum(one["restarts"] for one in app.all_stats(DRAFTER)) > restarts,
                60,
                "a restart",
            )
        finally:
            os.kill(victim, signal.SIGCONT)
    check_answers(outcomes)
    wait_until(
        lambda: all(one["engine_pid"] != victim for one in app.all_stats(DRAFTER)), 120, "another engine"
    )


def test_a_killed_replica_takes_its_engine_with_it_and_is_replaced(pool: RunningApp) -> None:
    app = pool
    known = {name for name, _, _ in routes(app)}
    replica = app.all_stats(DRAFTER)[0]["pid"]
    with traffic(app) as outcomes:
        os.kill(replica, signal.SIGKILL)
        wait_until(
            lambda: len({name for name, _, _ in routes(app)} - known) == 1, 120, "a new drafter listed"
        )
        wait_until(lambda: len(routes(app)) == 2, 60, "the dead one is gone from the list")
    check_answers(outcomes)
