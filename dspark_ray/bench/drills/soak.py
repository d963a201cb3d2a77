"""Hours of faults in minutes: mixed traffic, a random fault every twenty seconds, memory and descriptors flat."""

import random
import time
from collections import Counter
from collections.abc import Sequence

from dspark_ray.bench.drills.deployment import Deployment
from dspark_ray.bench.drills.drill import Drill, Fault, recover, resources
from dspark_ray.bench.drills.traffic import Case, Traffic

PERIOD_S = 20.0
SETTLED_AFTER = 0.2
"""Share of the time after which memory has to stay: allocators, caches and Ray's records of tasks fill up first."""
GROWTH_ALLOWED = 0.05


def soak(drills: Sequence[Drill], minutes: float, seed: int) -> Drill:
    """A drill made of many: their faults by turns, in random order, for so many minutes.

    Args:
        drills: whose faults; none may fail a request.
        minutes: how long.
        seed: of the order.
    """
    rng = random.Random(seed)  # noqa: S311

    def inject(deployment: Deployment, traffic: Traffic, known: Sequence[Case]) -> Fault:
        end = time.monotonic() + 60 * minutes
        injected: Counter[str] = Counter()
        problems, memory_mib, outcomes = [], [], []
        while (started := time.monotonic()) < end:
            drill = rng.choice(drills)
            injected[drill.name] += 1
            fault = drill.inject(deployment, traffic, known)
            if recover(fault, started) is None:
                problems.append(f"{drill.name}: never recovered")
            problems += [f"{drill.name}: {problem}" for problem in fault.problems]
            outcomes += fault.outcomes
            memory_mib.append(resources(deployment).rss_mib)
            time.sleep(max(0.0, started + PERIOD_S - time.monotonic()))
        settled, last = memory_mib[int(SETTLED_AFTER * len(memory_mib))], memory_mib[-1]
        if last.total() > settled.total() * (1 + GROWTH_ALLOWED):
            problems.append(f"memory grew from {dict(settled)} to {dict(last)} MiB")
        notes = {
            "minutes": minutes, "faults": dict(injected), "memory_mib": [one.total() for one in memory_mib],
            "memory_mib_first_settled_last": [dict(memory_mib[0]), dict(settled), dict(last)],
        }  # fmt: skip
        return Fault(outcomes=outcomes, problems=problems, notes=notes)

    return Drill(f"soak of {minutes:g} minutes", inject)
