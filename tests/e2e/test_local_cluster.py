"""README's commands: from nothing to a streamed answer, and back to nothing."""

import importlib.util
import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "cluster" / "local.sh"


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    for base in random.sample(range(30000, 32000, count), 50):
        try:
            for port in range(base, base + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return base
    raise AssertionError("no free ports")


class Local:
    """cluster/local.sh with a state folder and ports of its own."""

    def __init__(self, state: Path, base: int):
        self.state = state
        self.base = base
        self.env = {
            name: value for name, value in os.environ.items() if not name.startswith(("DSPARK_", "RAY_"))
        }
        self.env |= {
            "DSPARK_STATE": str(state),
            "DSPARK_VENV": sys.prefix,
            "DSPARK_PORT": str(base),
            "DSPARK_PORT_BASE": str(base + 1),
            "DSPARK_READY_S": "600",
        }

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(SCRIPT), *arguments],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def processes(self) -> list[int]:
        spec = importlib.util.spec_from_file_location("local_tools", ROOT / "cluster" / "local_tools.py")
        assert spec is not None
        assert spec.loader is not None
        tools = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tools)
        return list(tools.cluster_processes(str(self.state)))


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    local = Local(tmp_path / "state", free_ports(8))
    try:
        yield local
    finally:
        local.run("down")


@pytest.mark.timeout(900)
def test_demo_streams_an_answer_and_down_leaves_nothing(local: Local, demo_model: Path, tmp_path: Path):
    demo = local.run("demo")
    assert demo.returncode == 0, demo.stdout
    answer = re.search(
        r"is asked: .*\n\n(.+?)\n\n(\d+) tokens, the first after .* tokens/s", demo.stdout, re.DOTALL
    )
    assert answer, demo.stdout
    assert "sky" in answer[1]
    assert int(answer[2]) > 10
    for secret in (local.state / "secrets.env").read_text().split():
        value = secret.partition("=")[2]
        for pid in local.processes():
            assert value.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()

    status = local.run("status")
    assert status.returncode == 0, status.stdout
    assert "RUNNING" in status.stdout

    rival = Local(tmp_path / "rival", local.base)
    refused = rival.run("up")
    assert refused.returncode != 0
    assert f"port {local.base} is taken" in refused.stdout
    assert rival.run("down").returncode == 0
    assert local.run("status").returncode == 0

    down = local.run("down")
    assert down.returncode == 0, down.stdout
    assert local.processes() == []
    assert free_ports_again(local.base, 8)
    assert local.run("status").returncode != 0


def free_ports_again(base: int, count: int) -> bool:
    """Whether nothing listens on the ports any more."""
    for port in range(base, base + count):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return False
    return True
