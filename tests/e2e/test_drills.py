"""The short form of the fault drills, as anybody runs it: one deployment, steady traffic, one fault at a time."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dspark_ray.bench.drills.__main__ import SHORT

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 1200


@pytest.fixture(scope="module")
def verdicts(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the runner says of each drill; its deployment has ended by then."""
    file = tmp_path_factory.mktemp("drills") / "verdicts.json"
    command = [sys.executable, "-m", "dspark_ray.bench.drills", "--short", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    print(done.stdout)
    if not file.is_file():
        pytest.fail(f"no drill was run:\n{done.stderr[-5000:]}")
    return json.loads(file.read_text())


@pytest.mark.timeout(LONGEST_S)
@pytest.mark.parametrize("name", SHORT)
def test_nothing_is_lost_but_speed(name: str, verdicts: dict[str, Any]) -> None:
    assert name in verdicts, "the runner ended before it"
    assert verdicts[name]["passed"], verdicts[name]
