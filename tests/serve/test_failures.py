"""Clients that leave and replicas that die."""

import time
from pathlib import Path

import httpx
import psutil
import pytest
from serving_harness import RunningApp, wait_until

PREFILL, VERIFIER = "Prefill:smollm2", "Verifier:smollm2"
LONG = " ".join(f"item{number}" for number in range(150))


def is_idle(app: RunningApp) -> bool:
    gauges = ("requests_queued", "requests_waiting", "requests_running", "kv_usage")
    return not any(app.stats(name).get(gauge) for name in (PREFILL, VERIFIER) for gauge in gauges)


def engine_worker(app: RunningApp, deployment: str) -> psutil.Process:
    """The process that runs the model, below the replica's."""
    family = psutil.Process(app.stats(deployment)["pid"]).children(recursive=True)
    (worker,) = [process for process in family if "VLLM::EngineCore" in process.cmdline()]
    return worker


def test_idle_engines_rest_each_on_its_own_core(app: RunningApp) -> None:
    """NIXL on the CPU would gather them on one core and spin there (see `DSparkCPUWorker`)."""
    wait_until(lambda: is_idle(app), 20, "idle before the test")
    for deployment, core in ((PREFILL, 0), (VERIFIER, 1)):
        worker = engine_worker(app, deployment)
        assert worker.cpu_affinity() == [core]
        before = sum(worker.cpu_times()[:2])
        time.sleep(3)
        assert sum(worker.cpu_times()[:2]) - before < 0.5


def request(prompt: str, **options) -> dict:
    return {"model": "smollm2", "prompt": prompt, "max_tokens": 400, "ignore_eos": True} | options


def test_a_client_that_leaves_in_mid_stream_frees_everything_within_a_second(app: RunningApp) -> None:
    wait_until(lambda: is_idle(app), 20, "idle before the test")
    body = request("Once upon a time", stream=True)
    with httpx.stream("POST", f"{app.base_url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        for _ in range(20):
            next(lines)
        assert app.stats(VERIFIER)["kv_blocks_used"] > 0
    left = time.monotonic()
    generated = app.stats(VERIFIER)["tokens_generated"]
    wait_until(lambda: is_idle(app), 1.5, "blocks free after the client left", every_s=0.02)
    assert time.monotonic() - left < 1.5
    assert app.stats(VERIFIER)["tokens_generated"] < generated + 60


@pytest.mark.parametrize("after_s", [0.02, 0.1, 0.3, 0.8])
def test_a_client_that_leaves_before_the_first_token_frees_everything(
    app: RunningApp, after_s: float
) -> None:
    """Queued, in prefill, in transfer: wherever the request is when its client is gone."""
    wait_until(lambda: is_idle(app), 20, "idle before the test")
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{app.base_url}/v1/completions", json=request(f"{after_s} {LONG}"), timeout=after_s)
    wait_until(lambda: is_idle(app), 3, "blocks free after the client left")
    time.sleep(1)
    assert is_idle(app)


def test_kv_of_a_dead_prefill_replica_is_recomputed(app: RunningApp) -> None:
    killed = app.stats(PREFILL)["pid"]
    texts = app.drill(
        Path(__file__).with_name("drills.py"), "prefill_dies_before_its_kv_is_fetched", "smollm2"
    )
    assert texts["stale"] == texts["local"] != ""
    wait_until(lambda: app.stats(VERIFIER)["kv_usage"] == 0, 5, "the verifier's blocks free again")
    wait_for_prefill(app, killed)


def wait_for_prefill(app: RunningApp, killed: int) -> None:
    """Wait until another prefill replica than the killed one prefills."""
    wait_until(lambda: app.replica_states()[PREFILL] == {"RUNNING": 1}, 180, "a new prefill replica")
    assert app.stats(PREFILL)["pid"] != killed
    client = app.client()
    done = app.stats(VERIFIER)["remote_prefills"]["done"]

    def prefilled_remotely() -> bool:
        client.completions.create(model="smollm2", prompt=f"again {time.time()}", max_tokens=1)
        return app.stats(VERIFIER)["remote_prefills"]["done"] > done

    wait_until(prefilled_remotely, 30, "prefill on the new replica")
