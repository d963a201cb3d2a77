"""The deployment that drills run on: real Ray, Serve, vLLM and Redis on this machine, seen from outside.

One model in fp32, so that text is exact; two verifiers and two drafters, so that there is somewhere to go;
one prefill replica; KV blocks for two requests of the longest kind in each engine.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dspark_ray.bench.drills.redis_server import RedisServer
from dspark_ray.config import TelemetryConfig

APP, MODEL = "dspark", "smollm2"
TELEMETRY = TelemetryConfig(key_prefix="drills")
TITLES = {
    "verifier": (f"ServeReplica:{APP}:Verifier:",), "prefill": (f"ServeReplica:{APP}:Prefill:",),
    "drafter": (f"ServeReplica:{APP}:Drafter:",), "ingress": (f"ServeReplica:{APP}:Ingress",),
    "drafter-engine": ("DrafterEngine", f"ray::drafter:{APP}:"), "engine": ("VLLM::EngineCore",),
    "scheduler": ("ClusterScheduler", "ray::cluster-scheduler:"),
    "controller": ("ServeController", "ray::SERVE_CONTROLLER"), "proxy": ("ProxyActor",),
    "gcs": ("gcs_server",), "raylet": ("raylet/raylet",),
}  # fmt: skip
"""Kinds of processes, by a part of their titles; those of actors change with the method that runs."""
ROOT = Path(__file__).resolve().parents[3]
LONGEST_TOKENS = 512
BLOCK_TOKENS = 128
# 30 layers, keys and values, 3 heads of 64 numbers, fp32; vLLM keeps one block for itself.
KV_BLOCKS = 2 * LONGEST_TOKENS // BLOCK_TOKENS + 1
KV_GIB = KV_BLOCKS * BLOCK_TOKENS * 30 * 2 * 3 * 64 * 4 / 2**30
CALL_TIMEOUT_S = 5.0
LOGS_MIB = 400
GAUGES = ("requests_queued", "requests_waiting", "requests_running", "kv_blocks_used", "requests_in_hand")
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Shape:
    """How many replicas there are of what may be several."""

    verifiers: int = 2
    drafters: int = 2

    @property
    def replicas(self) -> dict[str, int]:
        """Replicas by deployment."""
        return {
            f"Verifier:{MODEL}": self.verifiers, f"Prefill:{MODEL}": 1, f"Drafter:{MODEL}": self.drafters,
            "Ingress": 1,
        }  # fmt: skip


def app_args(shape: Shape) -> dict[str, Any]:
    """The application's `AppConfig`, as plain data."""
    # Two cores for everything: one thread for each engine, wherever there is room.
    engine = {"env": {"OMP_NUM_THREADS": "1"}}
    return {
        "models": [
            {
                "id": MODEL,
                "target": {
                    "source": "demo:smollm2", "dtype": "float32", "max_model_len_tokens": LONGEST_TOKENS,
                    "max_num_seqs": 8, "kv_cache_gib": KV_GIB,
                    "engine": {"block_size": BLOCK_TOKENS},
                },
                "prefill": {"replicas": 1, "deadline_s": 8.0, "graceful_shutdown_timeout_s": 10, **engine},
                "drafter": {
                    "placement": "remote", "replicas": shape.drafters, "graceful_shutdown_timeout_s": 10,
                    "source": str(ROOT / "deployments" / "drafters" / "smollm2-135m"),
                },
                "verifier": {"replicas": shape.verifiers, "graceful_shutdown_timeout_s": 10, **engine},
            }
        ],
        "telemetry": {"key_prefix": TELEMETRY.key_prefix},
        "control": {"queue_max_requests": 8},
        "failover": {"silence_s": 15.0},
    }  # fmt: skip


class Deployment:
    """Ways into the running deployment, for drills.

    Args:
        shape: how many replicas.
        base_url: of its API.
        redis: its Redis.
        folder: of Ray's session, logs included.
        own_disk: whether that folder is a file system of its own.
    """

    def __init__(self, shape: Shape, base_url: str, redis: RedisServer, folder: Path, *, own_disk: bool):
        self.shape = shape
        self.base_url = base_url
        self.redis = redis
        self.folder = folder
        self.own_disk = own_disk
        self._handles: dict[str, Any] = {}

    # --- processes

    def processes(self, kind: str, below: str | None = None) -> list[psutil.Process]:
        """Processes of a kind of `TITLES`, oldest first; with ``below``, only those under one of that kind."""
        found = [process for process in family() if kind_of(process) == kind]
        if below is not None:
            found = [p for p in found if any(kind_of(parent) == below for parent in _parents(p))]
        return sorted(found, key=lambda process: process.create_time())

    # --- questions

    def stats(self, deployment: str) -> dict[int, dict[str, Any]]:
        """Counters of a deployment's replicas by process id; asked until all have answered or time is up."""
        from ray import serve

        if deployment not in self._handles:  # each has a router of its own
            self._handles[deployment] = serve.get_deployment_handle(deployment, APP)
        handle = self._handles[deployment]
        count = self.shape.replicas[deployment]
        found: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + CALL_TIMEOUT_S
        while len(found) < count and time.monotonic() < until:
            with contextlib.suppress(Exception):  # dying, hanging or starting: then it is not among them
                answer = handle.stats.remote().result(timeout_s=CALL_TIMEOUT_S / 2)
                found[answer["pid"]] = answer
        return found

    def drafters(self) -> dict[str, dict[str, Any]]:
        """Snapshots of the drafting actors that answer, by name."""
        import ray

        found = {}
        for entry in ray.util.list_named_actors(all_namespaces=True):
            if entry["name"].startswith(f"drafter:{APP}:"):
                with contextlib.suppress(Exception):
                    actor = ray.get_actor(entry["name"], entry["namespace"])
                    found[entry["name"]] = ray.get(actor.snapshot.remote(), timeout=CALL_TIMEOUT_S / 2)
        return found

    def scheduler(self) -> dict[str, Any]:
        """What the cluster scheduler says of itself; empty while it does not answer."""
        import ray

        from dspark_ray.serving.cluster_scheduler import NAMESPACE, scheduler_name

        try:
            actor = ray.get_actor(scheduler_name(TELEMETRY), NAMESPACE)
            status: dict[str, Any] = ray.get(actor.status.remote(), timeout=CALL_TIMEOUT_S / 2)
        except (ValueError, ray.exceptions.RayError):
            return {}
        return status

    def tau_sources(self) -> list[str]:
        """Where each live verifier's tau comes from, as the scheduler sees it: cluster or local."""
        models = self.scheduler().get("view", {}).get("models", [])
        return [r["tau_source"] for m in models for r in m["replicas"] if r["role"] == "verifier"]

    def all_running(self) -> bool:
        """Whether Serve's controller answers and says that every replica runs."""
        from ray import serve

        try:
            deployments = serve.status().applications[APP].deployments
        except Exception:  # the controller is away
            return False
        return all(
            dict(deployments[name].replica_states) == {"RUNNING": count}
            for name, count in self.shape.replicas.items()
        )

    def busy(self) -> dict[str, Any]:
        """Everything that is not at its idle value, by name; empty when idle and complete."""
        found: dict[str, Any] = {}
        for name, count in self.shape.replicas.items():
            replicas = self.stats(name)
            if len(replicas) != count:
                found[f"{name} answering"] = len(replicas)
            for gauge in GAUGES:
                if value := sum(replica.get(gauge, 0) for replica in replicas.values()):
                    found[f"{name} {gauge}"] = value
        drafters = self.drafters()
        if len(drafters) != self.shape.drafters:
            found["drafters answering"] = len(drafters)
        for gauge in ("slots_used", "queued"):
            if value := sum(drafter[gauge] for drafter in drafters.values()):
                found[f"drafters {gauge}"] = value
        return found

    def wait_idle(self, timeout_s: float) -> dict[str, Any]:
        """Wait until nothing is busy; what still was when time was up."""
        until = time.monotonic() + timeout_s
        while busy := self.busy():
            if time.monotonic() > until:
                break
            time.sleep(0.3)
        return busy

    def metrics(self) -> dict[str, list[float]]:
        """Prometheus metrics of this project as Ray exports them: all series' values by name."""
        import ray

        port = ray.nodes()[0]["MetricsExportPort"]
        values: dict[str, list[float]] = {}
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
                text = response.read().decode()
            for line in text.splitlines():
                if line.startswith("ray_dspark_"):
                    series, _, value = line.rpartition(" ")
                    values.setdefault(series.partition("{")[0], []).append(float(value))
        return values


def kind_of(process: psutil.Process) -> str:
    """The kind of a process; empty for others and for those that have ended."""
    try:
        # Short-lived helpers of Ray carry the names of what they start among their arguments.
        title = process.cmdline()[0] if process.status() != psutil.STATUS_ZOMBIE else ""
    except (psutil.Error, IndexError):
        return ""
    return next((kind for kind, parts in TITLES.items() if any(part in title for part in parts)), "")


def family() -> list[psutil.Process]:
    """All processes below this one; orphans come back to it (see `running_deployment`)."""
    return psutil.Process().children(recursive=True)


def _parents(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.parents()
    except psutil.Error:
        return []


@contextlib.contextmanager
def running_deployment(
    shape: Shape, tell: Callable[[str], None], logs: Path | None = None
) -> Iterator[Deployment]:
    """Start the deployment in this process's family; nothing of it is left at the end.

    Args:
        shape: how many replicas.
        tell: is told what takes long.
        logs: folder that keeps the logs of Ray and Serve.
    """
    # Orphans become children of this process, so that none escapes its eye, nor the end.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder = Path(tempfile.mkdtemp(prefix="drills-"))  # short: Ray's socket paths are
    own_disk = _mount(folder)
    redis = RedisServer()
    os.environ |= {
        "DSPARK_REDIS_URL": redis.url, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0",
        "RAY_DEDUP_LOGS": "0",
    }  # fmt: skip
    os.environ.pop("RAY_ADDRESS", None)
    import ray
    from ray import serve

    from dspark_ray.serving.app import build_app
    from dspark_ray.serving.ports import free_port_range

    port = free_port_range()
    started = time.monotonic()
    try:
        ray.init(
            num_cpus=32,  # logical: more than the machine has, or not all replicas fit
            include_dashboard=False,
            _temp_dir=str(folder / "ray"),
            object_store_memory=150 * 2**20,
            log_to_driver=False,
        )
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build_app(app_args(shape)), name=APP, route_prefix="/")
        deployment = Deployment(shape, f"http://127.0.0.1:{port}", redis, folder, own_disk=own_disk)
        tell(f"the deployment runs after {time.monotonic() - started:.0f} s")
        yield deployment
    finally:
        _end_family()
        if logs is not None:
            shutil.copytree(folder / "ray" / "session_latest" / "logs", logs, dirs_exist_ok=True)
        if own_disk:
            subprocess.run(["umount", "--lazy", folder], check=False)  # noqa: S603, S607
        shutil.rmtree(folder, ignore_errors=True)


def _mount(folder: Path) -> bool:
    """Give the logs a small disk of their own, so that it can be full; only root may."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={LOGS_MIB}m", "none", folder]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0  # noqa: S603


def _end_family() -> None:
    """Kill every process below this one: some hang, some have lost their parents, none has anything to save."""
    for _ in range(3):  # the first round's processes may have been starting others
        left = family()
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=10)
