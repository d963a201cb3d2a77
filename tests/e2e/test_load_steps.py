"""The control plane on a deployment under load: tau follows it, and so do the numbers of replicas."""

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_cluster import Local, free_ports


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    local = Local(tmp_path / "state", free_ports(8))
    local.env["DSPARK_CONFIG"] = "deployments/control-demo.yaml"
    try:
        yield local
    finally:
        local.run("down")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_load_moves_tau_and_replicas_up_and_back(local: Local, demo_model: Path, tmp_path: Path) -> None:
    up = local.run("up")
    assert up.returncode == 0, up.stdout
    command = [
        "python",
        "-m",
        "dspark_ray.bench.load_steps",
        "--model",
        "busy",
        "--steps",
        "1:15,16:180,1:90",
    ]
    done = local.run("run", *command, "--out", str(tmp_path))
    print(done.stdout)
    assert done.returncode == 0, "a request failed"
    assert "autoscaling wants verifier 1 → " in done.stdout
    assert (tmp_path / "load_steps.png").stat().st_size > 10_000
    rows = list(csv.DictReader((tmp_path / "load_steps.csv").read_text().splitlines()))
    busy = [row for row in rows if row["model"] == "busy"]
    loaded = [row for row in busy if row["streams"] == "16"]
    taus = [float(row["tau"]) for row in busy]
    assert taus[0] < 0.3
    assert max(float(row["tau"]) for row in loaded) > 0.55
    assert taus[-1] < 0.3
    assert max(float(row["tau"]) for row in rows if row["model"] == "idle") < 0.25
    for role in ("verifiers", "drafters"):
        sizes = [int(row[role]) for row in busy]
        assert (sizes[0], max(sizes), sizes[-1]) == (1, 2, 1), role
