"""One drill: traffic, a fault in its midst, recovery, rest; and the verdict."""

import contextlib
import datetime as dt
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from dspark_ray.bench.drills.deployment import Deployment, family, kind_of
from dspark_ray.bench.drills.traffic import Case, Outcome, Traffic

RECOVERY_PATIENCE_S = 180.0
REST_PATIENCE_S = 90.0
"""Slots of a verifier that is gone expire after 60 seconds."""
BEFORE_SHARE = 0.2
"""Share of the requests that are answered before the fault."""
FDS_ALLOWED = 12
TASKS_ALLOWED = 3
SHOWN = 5


@dataclass(frozen=True)
class Fault:
    """A fault that has been injected."""

    recovered: Callable[[], bool] = lambda: True
    """Whether everything works again, by itself or after `heal`."""
    heal: Callable[[], None] | None = None
    """What somebody else would do to end the fault: start Redis again, and the like."""
    heal_after_s: float = 0.0
    outcomes: Sequence[Outcome] = ()
    """Of requests that were part of the fault."""
    problems: Sequence[str] = ()
    """What else must not be; each fails the drill."""
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Drill:
    """A fault and what it may cost."""

    name: str
    inject: Callable[[Deployment, Traffic, Sequence[Case]], Fault]
    clients: int = 6
    in_soak: bool = False
    needs_own_disk: bool = False
    """Only where the deployment's folder is a file system of its own."""


@dataclass
class Resources:
    """What processes hold when nothing is to be done."""

    processes: Counter[str]
    fds: dict[int, int]
    tasks: dict[int, int]
    rss_mib: Counter[str]
    """Memory by kind of process."""
    kinds: dict[int, str]


def resources(deployment: Deployment) -> Resources:
    """Take stock."""
    found = Resources(Counter(), {}, {}, Counter(), {})
    for process in family():
        if kind := kind_of(process):
            try:
                found.fds[process.pid] = process.num_fds()
                found.rss_mib[kind] += round(process.memory_info().rss / 2**20)
            except psutil.Error:
                continue
            found.processes[kind] += 1
            found.kinds[process.pid] = kind
    for name in deployment.shape.replicas:
        for pid, stats in deployment.stats(name).items():
            found.tasks[pid] = stats["asyncio_tasks"]
    return found


def leaks(before: Resources, after: Resources) -> list[str]:
    """What has grown where it must not, in processes that lived all the while."""
    found = [
        f"{after.processes[kind] - count:+d} {kind} processes"
        for kind, count in before.processes.items()
        if after.processes[kind] != count
    ]
    for what, old, new, allowed in (
        ("file descriptors", before.fds, after.fds, FDS_ALLOWED),
        ("asyncio tasks", before.tasks, after.tasks, TASKS_ALLOWED),
    ):
        found += [
            f"{new[pid] - old[pid]:+d} {what} in {after.kinds.get(pid, 'a replica')} {pid}"
            for pid in old.keys() & new.keys()
            if new[pid] - old[pid] > allowed
        ]
    return found


class MetricsWatch:
    """Reads the exported metrics every second while a drill runs: the deepest and highest values, the growth."""

    def __init__(self, deployment: Deployment):
        self._deployment = deployment
        self._stopped = threading.Event()
        self._seen: list[dict[str, list[float]]] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            if values := self._deployment.metrics():
                self._seen.append(values)
            self._stopped.wait(2.0)

    def stop(self) -> dict[str, float]:
        """What they said; only what is not as it should be without a fault."""
        self._stopped.set()
        self._thread.join()
        said: dict[str, float] = {}

        def series(name: str) -> list[list[float]]:
            return [values[name] for values in self._seen if values.get(name)]

        if connected := series("ray_dspark_telemetry_connected"):
            said["telemetry_connected lowest"] = min(map(min, connected))
        if local := series("ray_dspark_policy_local"):
            said["policy_local highest"] = max(map(max, local))
        for counter in ("deadline_misses", "telemetry_failures", "policy_expirations"):
            totals = [sum(values) for values in series(f"ray_dspark_{counter}_total")]
            # Of processes that have died the series stay; those that start begin at 0.
            if totals:
                said[f"{counter} rose by"] = max(totals) - totals[0]
        quiet = {"telemetry_connected lowest": 1.0}
        return {name: value for name, value in said.items() if value != quiet.get(name, 0.0)}


def run_drill(deployment: Deployment, drill: Drill, known: Sequence[Case], requests: int) -> dict[str, Any]:
    """Run a drill and judge it.

    Args:
        deployment: idle.
        drill: what to do.
        known: requests with their answers.
        requests: answered at least, of which some before the fault.

    Returns:
        The verdict as plain data; ``passed`` sums it up and ``why`` says what was not right.
    """
    before = resources(deployment)
    watch = MetricsWatch(deployment)
    traffic = Traffic(deployment.base_url, known, drill.clients)
    traffic.start()
    try:
        _wait(lambda: len(traffic.outcomes) >= requests * BEFORE_SHARE, RECOVERY_PATIENCE_S)
        injected = time.monotonic()
        fault = _inject(drill, deployment, traffic, known)
        recovered_s = recover(fault, injected)
        # A hung client counts as answered in the end, so this ends, too.
        _wait(lambda: len(traffic.outcomes) >= requests, RECOVERY_PATIENCE_S)
    finally:
        traffic.stop()
        said = watch.stop()
    busy = deployment.wait_idle(REST_PATIENCE_S)
    after = resources(deployment)
    left = [f"{name}: {value}" for name, value in busy.items()] + leaks(before, after)
    outcomes = [*traffic.outcomes, *fault.outcomes]
    return _verdict(drill, fault, outcomes, injected, recovered_s) | {
        "leaked": left,
        "rss_mib": [before.rss_mib.total(), after.rss_mib.total()],
        "metrics": said,
    }


def _inject(drill: Drill, deployment: Deployment, traffic: Traffic, known: Sequence[Case]) -> Fault:
    """Inject; a drill that breaks has failed, and the next one may still tell something."""
    try:
        return drill.inject(deployment, traffic, known)
    except Exception as error:
        return Fault(problems=[f"the drill itself broke: {type(error).__name__}: {error}"])


def recover(fault: Fault, injected: float) -> float | None:
    """Wait until everything works again; seconds since the fault, None if it never did."""
    heal = fault.heal
    until = time.monotonic() + RECOVERY_PATIENCE_S + fault.heal_after_s
    while time.monotonic() < until:
        if heal is not None and time.monotonic() - injected >= fault.heal_after_s:
            heal()
            heal = None
        # What is asked may be away just now.
        with contextlib.suppress(Exception):
            if heal is None and fault.recovered():
                return time.monotonic() - injected
        time.sleep(0.3)
    return None


def _verdict(
    drill: Drill, fault: Fault, outcomes: Sequence[Outcome], injected: float, recovered_s: float | None
) -> dict[str, Any]:
    counts = Counter(outcome.verdict for outcome in outcomes)
    before = [o.seconds for o in outcomes if o.ended_s <= injected]
    return {
        "drill": drill.name,
        "when": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "requests": len(outcomes),
        "streamed": sum(outcome.streamed for outcome in outcomes),
        **{verdict: counts[verdict] for verdict in ("ok", "wrong", "failed", "hung", "cut")},
        "details": [
            f"{o.verdict}, {'stream' if o.streamed else 'whole'}: {o.detail}"
            for o in outcomes
            if o.verdict != "ok"
        ][:SHOWN],
        "recovered_s": None if recovered_s is None else round(recovered_s, 1),
        "healed_after_s": fault.heal_after_s,
        "median_s": round(statistics.median(before), 2) if before else None,
        "slowest_s": round(max((o.seconds for o in outcomes), default=0.0), 1),
        "problems": list(fault.problems),
        "notes": fault.notes,
    }


def reasons(verdict: dict[str, Any]) -> list[str]:
    """Why a drill has not passed; empty when it has."""
    found = [f"{verdict[kind]} {kind}" for kind in ("wrong", "failed", "hung", "cut") if verdict[kind]]
    if verdict["recovered_s"] is None:
        found.append("never recovered")
    return found + [f"left: {what}" for what in verdict["leaked"]] + verdict["problems"]


def _wait(condition: Callable[[], bool], patience_s: float) -> None:
    until = time.monotonic() + patience_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.1)
