"""Faults of processes and of Redis: killed, hung, emptied, closed, slow."""

import signal
import time
from collections.abc import Callable, Sequence

import psutil

from dspark_ray.bench.drills.deployment import MODEL, Deployment
from dspark_ray.bench.drills.drill import Drill, Fault
from dspark_ray.bench.drills.redis_server import RedisServer
from dspark_ray.bench.drills.traffic import Case, Traffic

Inject = Callable[[Deployment, Traffic, Sequence[Case]], Fault]
HANG_S = 12.0
"""How long what nobody watches hangs, until somebody lets it go on."""
PAUSE_S = 6.0


def drafters_work(deployment: Deployment) -> bool:
    """Whether the whole pool is in use."""
    found = deployment.drafters()
    return len(found) == deployment.shape.drafters and all(d["tokens_drafted"] > 0 for d in found.values())


def prefill_works(deployment: Deployment) -> bool:
    """Whether the prefill replica, and not the verifiers, reads prompts."""
    done = _prefills_done(deployment)
    time.sleep(1.0)
    return deployment.all_running() and _prefills_done(deployment) > done


def verifiers_work(deployment: Deployment) -> bool:
    """Whether every verifier generates."""
    found = deployment.stats(f"Verifier:{MODEL}")
    generating = len(found) == deployment.shape.verifiers and all(
        v["tokens_generated"] > 0 for v in found.values()
    )
    return generating and deployment.all_running()


def policies_hold(deployment: Deployment) -> bool:
    """Whether a scheduler rules and every verifier follows it."""
    status = deployment.scheduler()
    if not (status.get("ruling") and status.get("redis_connected")):
        return False
    return deployment.tau_sources() == ["cluster"] * deployment.shape.verifiers


def _prefills_done(deployment: Deployment) -> int:
    found = deployment.stats(f"Verifier:{MODEL}")
    return sum(v["remote_prefills"].get("done", 0) for v in found.values())


def _gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def lose(
    kind: str,
    sig: signal.Signals,
    works: Callable[[Deployment], bool],
    *,
    below: str | None = None,
    resumes: bool = False,
) -> Inject:
    """Send a signal to the oldest process of a kind.

    Args:
        kind: of `TITLES`.
        sig: SIGKILL, or SIGSTOP for a process that hangs.
        works: whether what it did is done again.
        below: only processes below one of that kind.
        resumes: a stopped one goes on after a while by itself; else another must have taken its place.
    """

    def inject(deployment: Deployment, _traffic: Traffic, _known: Sequence[Case]) -> Fault:
        running = deployment.processes(kind, below)
        victim = running[0]
        victim.send_signal(sig)

        def recovered() -> bool:
            replaced = _gone(victim) and len(deployment.processes(kind, below)) >= len(running)
            return (resumes or replaced) and works(deployment)

        heal = (lambda: victim.send_signal(signal.SIGCONT)) if resumes else None
        return Fault(recovered, heal, HANG_S if resumes else 0.0)

    return inject


def _redis(act: Callable[[RedisServer], None], heal: Callable[[RedisServer], None], after_s: float) -> Inject:
    def inject(deployment: Deployment, _traffic: Traffic, _known: Sequence[Case]) -> Fault:
        act(deployment.redis)
        return Fault(lambda: policies_hold(deployment), lambda: heal(deployment.redis), after_s)

    return inject


def _by_itself(_: RedisServer) -> None:
    """Nobody has to do anything."""


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
PROCESS_DRILLS = (
    Drill("kill drafter engine", lose("drafter-engine", KILL, drafters_work), in_soak=True),
    Drill("hang drafter engine", lose("drafter-engine", STOP, drafters_work), in_soak=True),
    Drill("kill drafter replica", lose("drafter", KILL, drafters_work), in_soak=True),
    Drill("hang drafter replica", lose("drafter", STOP, drafters_work)),
    Drill("kill prefill replica", lose("prefill", KILL, prefill_works), in_soak=True),
    Drill("hang prefill replica", lose("prefill", STOP, prefill_works)),
    Drill("kill prefill engine", lose("engine", KILL, prefill_works, below="prefill"), in_soak=True),
    Drill("hang prefill engine", lose("engine", STOP, prefill_works, below="prefill")),
    Drill("kill scheduler", lose("scheduler", KILL, policies_hold), in_soak=True),
    Drill("hang scheduler", lose("scheduler", STOP, policies_hold), in_soak=True),
    Drill("kill controller", lose("controller", KILL, Deployment.all_running)),
    Drill("hang controller", lose("controller", STOP, Deployment.all_running, resumes=True)),
    Drill("kill verifier replica", lose("verifier", KILL, verifiers_work)),
    Drill("hang verifier replica", lose("verifier", STOP, verifiers_work)),
    Drill("kill verifier engine", lose("engine", KILL, verifiers_work, below="verifier")),
    Drill("hang verifier engine", lose("engine", STOP, verifiers_work, below="verifier")),
)
REDIS_DRILLS = tuple(
    Drill(name, _redis(act, heal, after_s), in_soak=True)
    for name, act, heal, after_s in (
        ("kill redis", RedisServer.kill, RedisServer.restart, HANG_S),
        ("hang redis", lambda r: r.signal(STOP), lambda r: r.signal(signal.SIGCONT), HANG_S),
        ("redis FLUSHALL", RedisServer.flush, _by_itself, 2.0),
        ("redis CLIENT PAUSE", lambda r: r.pause(PAUSE_S), _by_itself, PAUSE_S),
        ("redis AUTH change", lambda r: r.change_password("a"), lambda r: r.change_password("", "a"), HANG_S),
    )
)
