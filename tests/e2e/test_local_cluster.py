"""README's commands: from nothing to a streamed answer, and back to nothing."""

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_cluster import Local, free_ports


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
    shown = local.run("run", "dspark-ray", "status")
    assert shown.returncode == 0, shown.stdout
    assert re.search(r"scheduler \w+ rules", shown.stdout), shown.stdout

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
