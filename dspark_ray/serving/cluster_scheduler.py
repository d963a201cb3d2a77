"""The cluster scheduler: one named, detached, restartable actor for all models of a deployment.

It only reads samples and writes policies; no request ever passes through it. Everything that it knows can be
read again from Redis, so Ray may restart it at any time; meanwhile replicas follow their last policy, then
themselves.
"""

import asyncio
import logging
import os
import random
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import ray
from ray.actor import ActorHandle

from dspark_ray.config import ControlConfig, TelemetryConfig
from dspark_ray.control.autoscaling import RoleTelemetry, summarise
from dspark_ray.control.brain import ClusterBrain, Decisions
from dspark_ray.control.connection import Backoff
from dspark_ray.control.metrics import SCHEDULER_METRICS
from dspark_ray.control.ruling import Ruler
from dspark_ray.control.telemetry import STORE_ERRORS, TelemetryStore
from dspark_ray.control.view import cluster_view
from dspark_ray.protocol import DrafterRoute, SizingDecision
from dspark_ray.serving.telemetry import MetricSet

logger = logging.getLogger(__name__)
NAMESPACE = "dspark"
METRICS_INTERVAL_S = 1.0
WATCH_PERIOD_S = 5.0
# Well above what a tick may wait for Redis.
HANG_AFTER_S = 15.0


def scheduler_name(telemetry: TelemetryConfig) -> str:
    """Name of the actor in namespace ``dspark``: one for each key prefix."""
    return f"cluster-scheduler:{telemetry.key_prefix}"


def ensure_cluster_scheduler(control: ControlConfig, telemetry: TelemetryConfig) -> ActorHandle | None:
    """Start the deployment's scheduler unless it runs, and give it this configuration either way.

    Returns:
        Its handle; None where the environment names no Redis: replicas follow their own load then.

    Raises:
        ConfigError: the Redis URL cannot be understood.
    """
    url = os.environ.get(telemetry.redis_url_env)
    if not url:
        return None
    TelemetryStore(url, telemetry, control)
    actor = ray.remote(ClusterScheduler).options(
        name=scheduler_name(telemetry),
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        max_concurrency=8,
        num_cpus=0,
        get_if_exists=True,
    )
    settings = _plain_settings(control, telemetry)
    handle = actor.remote(*settings)
    handle.configure.remote(*settings)
    return handle


def _plain_settings(
    control: ControlConfig, telemetry: TelemetryConfig
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """What a `ClusterScheduler` is started and configured with."""
    return control.model_dump(), telemetry.model_dump(), os.environ[telemetry.redis_url_env]


async def watch_cluster_scheduler(
    scheduler: ActorHandle, control: Callable[[], ControlConfig], telemetry: TelemetryConfig
) -> None:
    """Have a scheduler that hangs killed, for as long as this task runs; Ray starts it anew on the same handle.

    Ray gives a new instance what the first one was started with, which may be long out of date: it is told again.

    Args:
        scheduler: from `ensure_cluster_scheduler`.
        control: the bounds in force.
        telemetry: where samples and policies are.
    """
    known_owner = None
    while True:
        await asyncio.sleep(WATCH_PERIOD_S)
        try:
            owner, silent_s = await asyncio.wait_for(scheduler.alive.remote(), HANG_AFTER_S)
        except TimeoutError:
            owner, silent_s = known_owner, HANG_AFTER_S
        except ray.exceptions.RayError:
            continue  # it is restarting
        if silent_s >= HANG_AFTER_S:
            logger.warning("the cluster scheduler hangs and is started anew")
            ray.kill(scheduler, no_restart=False)
        elif owner != known_owner:
            scheduler.configure.remote(*_plain_settings(control(), telemetry))
            known_owner = owner


class ClusterScheduler:
    """Ticks in a thread of its own; its methods are what others may ask.

    Args:
        control: a `ControlConfig` as plain data.
        telemetry: a `TelemetryConfig` as plain data.
        redis_url: where samples and policies are.
    """

    def __init__(self, control: dict[str, Any], telemetry: dict[str, Any], redis_url: str) -> None:
        """Starts ticking at once."""
        self._owner = uuid.uuid4().hex
        self._rule_at(
            ControlConfig.model_validate(control), TelemetryConfig.model_validate(telemetry), redis_url
        )
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._ticks = self._failures = 0
        self._came_round_s = time.monotonic()
        self._tick_s = 0.0
        self._routes: dict[str, tuple[DrafterRoute, ...]] = {}
        self._sizing: dict[str, SizingDecision] = {}
        self._unsaved_sizing: dict[str, SizingDecision] = {}
        self._drifting: set[str] = set()
        self._metrics = MetricSet(SCHEDULER_METRICS)
        self._exported_at_s = 0.0
        self._thread = threading.Thread(target=self._run, name="dspark-scheduler", daemon=True)
        self._thread.start()

    def _rule_at(self, control: ControlConfig, telemetry: TelemetryConfig, redis_url: str) -> None:
        """Begin with nothing known."""
        self._control, self._telemetry, self._redis_url = control, telemetry, redis_url
        self._store = TelemetryStore(redis_url, telemetry, control)
        self._brain = ClusterBrain(control, telemetry.sample_lifetime_s)
        self._ruler = Ruler(self._store, self._brain, self._owner, time.monotonic)
        self._backoff = Backoff(
            control.tick_interval_s,
            telemetry.backoff_max_s,
            random.Random(),  # noqa: S311
        )

    # --- what others may ask

    def configure(self, control: dict[str, Any], telemetry: dict[str, Any], redis_url: str) -> None:
        """Follow other settings, as plain data, from the next tick on; replicas keep their state.

        Other telemetry is another place to rule at: what is known of the replicas is read anew there. The lease at
        the old place runs out by itself.
        """
        new, place = ControlConfig.model_validate(control), TelemetryConfig.model_validate(telemetry)
        with self._lock:
            if (place, redis_url) != (self._telemetry, self._redis_url):
                logger.warning("telemetry has changed: ruling goes on there")
                self._rule_at(new, place, redis_url)
            self._control = self._brain.control = new
            self._store.configure(new)

    def status(self) -> dict[str, Any]:
        """Everything known, as plain data; rates cover the last seconds."""
        with self._lock:
            policies = self._brain.published()
            lease = self._ruler.lease
            view = cluster_view(self._brain.book, policies, self._routes, self._sizing, lease)
            return {
                "owner": self._owner,
                "ruling": self._ruler.ruling,
                "ticks": self._ticks,
                "failures": self._failures,
                "redis_connected": self._backoff.failures == 0,
                "tick_ms": self._tick_s * 1e3,
                "pid": os.getpid(),
                "view": msgspec.to_builtins(view),
            }

    def alive(self) -> tuple[str, float]:
        """Which instance this is, and the seconds since its last tick began, whether or not that found Redis."""
        return self._owner, time.monotonic() - self._came_round_s

    def exchange_sizing(
        self, decisions: Mapping[str, SizingDecision]
    ) -> tuple[dict[str, RoleTelemetry], float | None]:
        """The autoscaling policy's question: what do the deployments report?

        Args:
            decisions: what it decided last, by deployment, for status and top.

        Returns:
            Telemetry by deployment, empty unless this scheduler rules, and the tau up to which load raises
            it (None where it does not).
        """
        with self._lock:
            self._sizing = dict(decisions)
            self._unsaved_sizing = dict(decisions)
            if not self._ruler.ruling:
                return {}, None
            by_deployment = defaultdict(list)
            for member in self._brain.book.members.values():
                by_deployment[member.sample.deployment].append(member)
            tau_max = None if self._control.policy == "fixed_tau" else self._control.tau_max
            return {name: summarise(members) for name, members in by_deployment.items()}, tau_max

    def stop(self) -> None:
        """Stop ticking and give the lease back."""
        self._stopped.set()
        self._thread.join(self._telemetry.timeout_s * 2)
        try:
            self._ruler.resign()
        except STORE_ERRORS:
            logger.warning("the lease could not be given back; it runs out by itself")

    # --- the thread

    def _run(self) -> None:
        while not self._stopped.is_set():
            started_s = time.monotonic()
            pause_s = self._step(started_s)
            self._stopped.wait(max(0.0, started_s + pause_s - time.monotonic()))

    def _step(self, started_s: float) -> float:
        """One tick, whatever happens; returns the seconds from its start to the next one."""
        self._came_round_s = started_s
        try:
            with self._lock:
                decisions = self._ruler.step()
                unsaved, self._unsaved_sizing = self._unsaved_sizing, {}
            self._store.put_sizing(unsaved)
        except STORE_ERRORS as error:
            self._failures += 1
            if self._backoff.failures == 0:
                logger.warning("Redis does not answer: %s", type(error).__name__)
            return self._backoff.failed()
        except Exception:  # a fault in one tick must not end ruling
            self._failures += 1
            logger.exception("a tick failed")
            return self._backoff.failed()
        self._backoff.succeeded()
        if decisions is not None:
            self._ticks += 1
            self._routes = decisions.routes
            self._log_drift(decisions)
        self._tick_s = time.monotonic() - started_s
        if started_s - self._exported_at_s >= METRICS_INTERVAL_S:
            self._exported_at_s = started_s
            self._export()
        return self._control.tick_interval_s

    def _log_drift(self, decisions: Decisions) -> None:
        for replica in decisions.drifting.keys() - self._drifting:
            logger.warning(
                "verifier %s: predicted and observed acceptance differ by %.2f: calibrate its drafter "
                "(dspark-ray calibrate --from-logs). Verify length follows observed acceptance meanwhile.",
                replica,
                decisions.drifting[replica],
            )
        self._drifting = set(decisions.drifting)

    def _export(self) -> None:
        own = {"owner": self._owner}
        self._metrics.set("dspark_scheduler_ruling", float(self._ruler.ruling), own)
        self._metrics.set("dspark_scheduler_tick_seconds", self._tick_s, own)
        self._metrics.set("dspark_scheduler_ticks", self._ticks, own)
        if not self._ruler.ruling:
            return
        with self._lock:
            samples = [m.sample for m in self._brain.book.members.values()]
            policies = self._brain.published()
        counts: dict[tuple[str, str], int] = defaultdict(int)
        for sample in samples:
            counts[sample.model, sample.role] += 1
            if sample.replica in policies:
                tags = {"model": sample.model, "replica": sample.replica}
                self._metrics.set("dspark_load", policies[sample.replica].load, tags)
                self._metrics.set("dspark_drifting", float(sample.replica in self._drifting), tags)
        for (model, role), count in counts.items():
            self._metrics.set("dspark_replicas", count, {"model": model, "role": role})
        for decision in self._sizing.values():
            tags = {"model": decision.model, "role": decision.role}
            self._metrics.set("dspark_replicas_wanted", decision.wanted, tags)
