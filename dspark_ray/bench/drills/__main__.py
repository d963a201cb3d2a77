"""Fault drills: ``python -m dspark_ray.bench.drills [--short | --long | --drill NAME ...] [--json FILE]``.

Starts one deployment (real Ray, Serve, vLLM, Redis), learns its answers, then by turns breaks one thing under
steady traffic and judges: requests that failed or hung, wrong text, the time until everything works again, what
was left behind, and what the metrics said. The exit status is 1 if a drill has not passed.

With --json the verdicts are merged into FILE by name, so that the long form can be run in pieces.
"""

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click

from dspark_ray.bench.drills.crowds import CROWD_DRILLS
from dspark_ray.bench.drills.deployment import Shape, running_deployment
from dspark_ray.bench.drills.disk import DISK_DRILLS
from dspark_ray.bench.drills.drill import Drill, reasons, run_drill
from dspark_ray.bench.drills.faults import PROCESS_DRILLS, REDIS_DRILLS
from dspark_ray.bench.drills.report import table
from dspark_ray.bench.drills.rogues import ROGUE_DRILLS
from dspark_ray.bench.drills.sampling import SAMPLING_DRILLS
from dspark_ray.bench.drills.soak import soak
from dspark_ray.bench.drills.traffic import Traffic, cases, learn

GROUPS = (PROCESS_DRILLS, REDIS_DRILLS, ROGUE_DRILLS, CROWD_DRILLS, DISK_DRILLS, SAMPLING_DRILLS)
DRILLS = {drill.name: drill for group in GROUPS for drill in group}
SHORT = (
    "kill drafter engine",
    "drafter: random tokens",
    "kill redis",
    "kill scheduler",
    "kill prefill replica",
    "kill verifier replica",
    "abort storm of 100",
)
SHORT_REQUESTS, LONG_REQUESTS = 40, 200
CASES = 12


def tell(text: str) -> None:
    """Progress, on stderr."""
    click.echo(f"{time.strftime('%H:%M:%S')} {text}", err=True)


@click.command(help=__doc__)
@click.option("--short", "form", flag_value="short", default="short", help="The most telling drills.")
@click.option("--long", "form", flag_value="long", help="All drills.")
@click.option("--drill", "names", multiple=True, type=click.Choice(sorted(DRILLS)), help="Only these.")
@click.option("--soak", "minutes", type=float, help="Random faults for so many minutes instead.")
@click.option("--seed", default=0, help="Of the order of a soak's faults.")
@click.option("--requests", type=int, help="Requests answered in each drill.")
@click.option("--verifiers", default=2, help="Verifier replicas; 1 starts faster, and none takes over.")
@click.option("--drafters", default=2, help="Drafter replicas.")
@click.option(
    "--logs", type=click.Path(path_type=Path), help="Keep the logs of Ray and Serve in this folder."
)
@click.option("--json", "file", type=click.Path(path_type=Path), help="Merge the verdicts into this file.")
def main(
    form: str,
    names: tuple[str, ...],
    minutes: float | None,
    seed: int,
    requests: int | None,
    verifiers: int,
    drafters: int,
    logs: Path | None,
    file: Path | None,
) -> None:
    """See the module's docstring."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing of the deployment is left
    chosen = [DRILLS[name] for name in names or (SHORT if form == "short" else tuple(DRILLS))]
    each = requests or (SHORT_REQUESTS if form == "short" else LONG_REQUESTS)
    if minutes is not None:
        chosen = [soak([drill for drill in DRILLS.values() if drill.in_soak], minutes, seed)]
    verdicts: dict[str, Any] = {}
    with running_deployment(Shape(verifiers, drafters), tell, logs) as deployment:
        known = asyncio.run(learn(deployment.base_url, cases(CASES)))
        warm_up(deployment.base_url, known)
        tell(f"answers learnt, {len(chosen)} drills follow")
        for drill in chosen:
            if drill.needs_own_disk and not deployment.own_disk:
                tell(f"{drill.name}: left out, since only root may give the logs a disk of their own")
                continue
            if busy := deployment.wait_idle(60):
                tell(f"not idle before {drill.name!r}: {busy}")
            verdicts[drill.name] = one(deployment, drill, known, each)
            if file is not None:
                merge(file, verdicts)
    click.echo(table(verdicts))
    sys.exit(0 if all(verdict["passed"] for verdict in verdicts.values()) else 1)


def one(deployment: Any, drill: Drill, known: Any, requests: int) -> dict[str, Any]:
    """Run a drill and say how it went."""
    verdict = run_drill(deployment, drill, known, requests)
    why = reasons(verdict)
    verdict |= {"passed": not why, "why": why}
    tell(f"{drill.name}: {'passed' if not why else '; '.join(why)} {json.dumps(verdict)}")
    return verdict


def warm_up(base_url: str, known: Any) -> None:
    """Have every connection made and every peer met before anything is counted."""
    traffic = Traffic(base_url, known)
    traffic.start()
    try:
        while len(traffic.outcomes) < 2 * len(known):
            time.sleep(0.2)
    finally:
        traffic.stop()
    if wrong := [o for o in traffic.outcomes if o.verdict != "ok"]:
        raise click.ClickException(f"wrong without any fault: {wrong[:3]}")


def merge(file: Path, verdicts: dict[str, Any]) -> None:
    """Put verdicts into a file that may hold others."""
    held = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(held | verdicts, indent=1) + "\n")


if __name__ == "__main__":
    main()
