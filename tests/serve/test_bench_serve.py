"""`dspark-ray bench serve` against the running application: arms by turns, counters, report."""

import os
import subprocess
import sys
from pathlib import Path

from serving_harness import REPO, RunningApp

from dspark_ray.bench.results import Row, load, summary


def measure(out: Path, *arguments: str, **environ: str) -> dict[tuple[str, str], Row]:
    """Run the command and return its rows by arm and load, all of which must have been answered."""
    done = subprocess.run(
        [
            sys.executable, "-c", "from dspark_ray.cli import main; main()", "bench", "serve", *arguments,
            "--out", str(out), "--dataset", "gsm8k", "--rounds", "1", "--max-tokens", "16",
        ],
        env={**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(REPO), **environ},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = summary(load(out / "results.json"))
    assert done.stdout.count("\n|") == 2 + len(rows), done.stdout  # head, rule, and each row
    assert all(row.failed == 0 and row.requests >= 2 for row in rows), done.stderr
    return {(row.arm, row.offer): row for row in rows}


def test_arms_take_turns_and_say_the_same(app: RunningApp, tmp_path: Path) -> None:
    """Any server of the API, here two models of one."""
    rows = measure(
        tmp_path, "--url", f"{app.base_url}/v1", "--arm", "large:model=smollm2", "--arm", "small:model=small/local",
        "--streams", "2", "--rates", "4", "--seconds", "0.5",
    )  # fmt: skip
    assert set(rows) == {
        (arm, offer) for arm in ("large", "small") for offer in ("2 streams", "4 requests/s")
    }
    assert rows["small", "2 streams"].same_text == 1.0  # fp32: the same weights say the same
    assert rows["small", "2 streams"].ratios["large"].median > 0
    assert rows["large", "2 streams"].counts is None
    assert (tmp_path / "report.html").read_text().count("<svg") >= 3
