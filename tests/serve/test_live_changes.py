"""A deployment with a drafter: changed under traffic by ``serve deploy``, then robbed of its verifier."""

import itertools
import shutil
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serving_harness import REPO, RunningApp, running_app, wait_until
from test_lost_verifier import answers_outlive_a_kill

DRAFTER = REPO / "deployments" / "drafters" / "smollm2-135m"
DRIVER = REPO / "tests" / "serving_driver.py"
ROLES = PREFILL, VERIFIER, POOL = "Prefill:smollm2", "Verifier:smollm2", "Drafter:smollm2"
REQUESTS = 64
ARGS = {
    "models": [
        {
            "id": "smollm2",
            "target": {
                "source": "demo:smollm2",
                "dtype": "float32",
                "max_model_len_tokens": 2048,
                "max_num_seqs": 8,
                "kv_cache_gib": 0.25,
                "engine": {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"},
            },
            "drafter": {"placement": "remote", "source": str(DRAFTER)},
            "scheduling": {"mode": "tau"},
            "prefill": {"replicas": 1, "cpu_cores": "0"},
            "verifier": {"cpu_cores": "1"},
        }
    ],
    "failover": {"silence_s": 20},
    "control": {"policy": "guide", "tau_min": 0.2, "tau_max": 0.3},
}


@pytest.fixture(scope="module")
def other_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped drafter after a little more training, so to speak: the same shapes, other weights."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(DRAFTER, tmp_path_factory.mktemp("drafters") / "next")
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"] = tensors["norm.weight"] * 1.01
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def app(demo_model: Path) -> Iterator[RunningApp]:
    with running_app(ARGS, DRIVER, "--declarative") as app:
        yield app


class Traffic:
    """Clients that ask the same few things again and again; greedy and seeded answers never change."""

    def __init__(self, app: RunningApp):
        self._client = app.client()
        self._numbers = itertools.count()
        self._stopped = threading.Event()
        self.answers: dict[int, set[str]] = defaultdict(set)
        self.failures: list[Exception] = []
        self.done = 0

    def ask(self) -> None:
        while not (self._stopped.is_set() and self.done >= REQUESTS):
            kind = next(self._numbers) % 8
            options = {"temperature": 0} if kind % 2 else {"temperature": 1.0, "seed": kind}
            try:
                answer = self._client.completions.create(
                    model="smollm2",
                    prompt=f"{kind}. The story of the old sailor begins",
                    max_tokens=48,
                    stream=kind % 4 > 1,
                    **options,
                )
                said = (
                    "".join(chunk.choices[0].text for chunk in answer)
                    if kind % 4 > 1
                    else answer.choices[0].text
                )
                self.answers[kind].add(said)
            except Exception as error:  # each one is to be seen
                self.failures.append(error)
            self.done += 1

    def stop(self) -> None:
        self._stopped.set()


def worker(app: RunningApp) -> dict:
    return app.stats(VERIFIER)["workers"]


def rounds_rise(app: RunningApp) -> bool:
    before = worker(app)["shim"]["rounds"]
    return bool(wait_until(lambda: worker(app)["shim"]["rounds"] > before, 30, "drafts verified"))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_bounds_mode_and_drafter_change_under_traffic(app: RunningApp, other_drafter: Path) -> None:
    def user_config(*names: str, **config: object) -> list[dict]:
        return [{"name": name, "user_config": config} for name in names]

    pids = {name: app.stats(name)["pid"] for name in (PREFILL, VERIFIER)}
    traffic = Traffic(app)
    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(traffic.ask) for _ in range(4)]
        try:
            rounds_rise(app)
            assert 0.2 <= worker(app)["tau"] <= 0.3

            bounds = {"tau_min": 0.6, "tau_max": 0.7}
            app.deploy(ARGS, *user_config("Ingress", VERIFIER, control=bounds))
            wait_until(lambda: 0.6 <= worker(app)["tau"] <= 0.7, 30, "tau within its new bounds")
            app.deploy(
                ARGS, *user_config("Ingress", VERIFIER, control=bounds, scheduling={"mode": "fixed_len"})
            )
            wait_until(lambda: worker(app)["mode"] == "fixed_len", 30, "the new mode")
            app.deploy(ARGS)
            wait_until(
                lambda: worker(app)["tau"] <= 0.3 and worker(app)["mode"] == "tau", 30, "all taken back"
            )

            source = str(other_drafter)
            app.deploy(ARGS, *user_config(POOL, drafter_source=source))
            wait_until(
                lambda: worker(app)["client"]["mismatched"] > 0, 60, "a pool that is ahead of its verifier"
            )
            app.deploy(ARGS, *user_config(*ROLES, drafter_source=source))
            rounds_rise(app)
            handoffs = worker(app)["shim"]["handoffs_received"]
            wait_until(
                lambda: worker(app)["shim"]["handoffs_received"] > handoffs, 30, "prompt features handed over"
            )
            mismatched = worker(app)["client"]["mismatched"]
            rounds_rise(app)
            assert worker(app)["client"]["mismatched"] == mismatched

            app.deploy(ARGS, *user_config(*ROLES, drafter_source="/no/such/folder"))
            rounds_rise(app)
        finally:
            traffic.stop()
            for client in clients:
                client.result()
    assert traffic.failures == []
    assert traffic.done >= REQUESTS
    assert {kind: len(said) for kind, said in traffic.answers.items()} == dict.fromkeys(range(8), 1)
    assert {name: app.stats(name)["pid"] for name in pids} == pids, "nothing was restarted"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_answers_outlive_a_verifier_that_drafts(app: RunningApp) -> None:
    answers_outlive_a_kill(app)
    rounds = worker(app)["shim"]["rounds"]
    assert rounds > 0, "the new verifier drafts, too"
