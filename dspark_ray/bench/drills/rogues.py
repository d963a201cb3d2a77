"""Drills with a drafter that misbehaves, see `rogue`."""

import time
from collections.abc import Sequence

from dspark_ray.bench.drills.deployment import MODEL, Deployment
from dspark_ray.bench.drills.drill import Drill, Fault
from dspark_ray.bench.drills.faults import Inject
from dspark_ray.bench.drills.rogue import SPOILERS, RogueDrafter, Spoiler
from dspark_ray.bench.drills.traffic import Case, Traffic
from dspark_ray.config import ControlConfig, TelemetryConfig
from dspark_ray.control.telemetry import TelemetryStore

VOCABULARY = 49152
STAY_S = 15.0
CALLS_LEAST = 20
PATIENCE_S = 60.0


def join_the_pool(kind: str) -> Inject:
    """Have a drafter of that kind of `SPOILERS` join the pool for a while."""

    def inject(deployment: Deployment, _traffic: Traffic, _known: Sequence[Case]) -> Fault:
        real = next(iter(deployment.stats(f"Drafter:{MODEL}").values()))
        rogue = RogueDrafter(real["endpoint"], Spoiler(SPOILERS[kind], VOCABULARY))
        telemetry = TelemetryConfig(key_prefix="drills")
        rogue.join_pool(TelemetryStore(deployment.redis.url, telemetry, ControlConfig()), MODEL)
        until = time.monotonic() + PATIENCE_S
        while rogue.calls < CALLS_LEAST and time.monotonic() < until:
            time.sleep(0.1)
        problems: list[str] = (
            [] if rogue.calls >= CALLS_LEAST else [f"it was called {rogue.calls} times only"]
        )
        notes: dict[str, int] = {}

        def leave() -> None:
            rogue.stop()
            notes["calls"] = rogue.calls

        def forgotten() -> bool:
            status = deployment.scheduler()
            models = status.get("view", {}).get("models", [])
            return [set(m["drafters"]) & {"rogue"} for m in models] == [set()] and (
                deployment.tau_sources() == ["cluster"] * deployment.shape.verifiers
            )

        # Counted from the injection, which has taken a while by now.
        return Fault(forgotten, leave, STAY_S, problems=problems, notes=notes)

    return inject


ROGUE_DRILLS = tuple(Drill(f"drafter: {kind}", join_the_pool(kind), in_soak=True) for kind in SPOILERS)
