"""`dspark-ray bench serve` against the running application: arms by turns, counters, report."""

import os
import subprocess
import sys
from pathlib import Path

from serving_harness import REPO, RunningApp

from dspark_ray.bench.results import load, summary


def test_arms_take_turns_on_one_deployment_and_say_the_same(app: RunningApp, tmp_path: Path) -> None:
    address = app.drill(Path(__file__).with_name("drills.py"), "ray_address")
    out = tmp_path / "out"
    done = subprocess.run(
        [
            sys.executable, "-c", "from dspark_ray.cli import main; main()", "bench", "serve",
            "--url", f"{app.base_url}/v1", "--out", str(out), "--dataset", "gsm8k",
            "--arm", "off:model=smollm2,mode=off", "--arm", "fixed:model=smollm2,mode=fixed_len",
            "--arm", "other:model=small/local",
            "--streams", "2", "--rates", "4", "--seconds", "0.5", "--rounds", "1", "--max-tokens", "16",
        ],
        env={**os.environ, "RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(REPO)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    app.speculate()
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n|") == 2 + 2 * 3  # head and rule, then each arm at each load
    rows = {(row.arm, row.offer): row for row in summary(load(out / "results.json"))}
    assert all(row.failed == 0 and row.requests >= 2 for row in rows.values()), done.stderr
    off, fixed, other = (rows[arm, "2 streams"] for arm in ("off", "fixed", "other"))
    assert off.counts.verified == 0
    assert off.counts.committed >= off.requests * 15
    assert fixed.counts.verify_len > 1
    assert fixed.counts.acceptance_at
    assert other.counts is None
    assert (fixed.same_text, other.same_text) == (1.0, 1.0)  # fp32: the same model says the same
    assert (out / "report.html").read_text().count("<svg") >= 6
