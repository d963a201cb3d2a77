"""What `cluster/local.sh down` may end: exactly the processes of its own state folder."""

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parents[2] / "cluster" / "local_tools.py"
# A process whose child has no mark (like one that overwrote its environment); the child prints its id.
CHILD = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{CHILD}'], env={{}})"
STUBBORN = PARENT.replace(
    "import os,", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); import os,"
)


@pytest.fixture(scope="module")
def tools() -> ModuleType:
    spec = importlib.util.spec_from_file_location("local_tools", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def marked(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process of the state folder tmp_path, and the id of its unmarked child."""
    env = os.environ | {"DSPARK_LOCAL_CLUSTER": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], env=env, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        yield parent, int(parent.stdout.readline())
        parent.kill()


def test_marked_processes_and_their_descendants_are_found_and_no_others(
    tools: ModuleType, marked: tuple[subprocess.Popen[str], int], tmp_path: Path
):
    parent, child = marked
    assert set(tools.cluster_processes(str(tmp_path))) == {parent.pid, child}
    assert tools.cluster_processes(str(tmp_path)[:-1]) == {}
    assert tools.cluster_processes(str(tmp_path / "other")) == {}


def running(pid: int) -> bool:
    """Whether a process runs: zombies do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_stop_ends_them_all_also_one_that_outlives_its_parent(tools: ModuleType, tmp_path: Path):
    # The child has no mark and ignores the polite signal, so once its parent is gone only memory leads to it.
    env = os.environ | {"DSPARK_LOCAL_CLUSTER": str(tmp_path)}
    with (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as bystander,
        subprocess.Popen(
            [sys.executable, "-c", STUBBORN], env=env, stdout=subprocess.PIPE, text=True
        ) as parent,
    ):
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert tools.stop(str(tmp_path), polite_s=1.0) == 0
        assert (running(parent.pid), running(child), running(bystander.pid)) == (False, False, True)
        bystander.kill()


def test_taken_ports_are_named(tools: ModuleType, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
        port, free_port = taken.getsockname()[1], free.getsockname()[1]
        free.close()
        assert tools.check_ports([str(port), f"127.0.0.1:{free_port}"]) == 1
        assert capsys.readouterr().err == f"port {port} is taken (Address already in use)\n"
        assert tools.check_ports([f"127.0.0.1:{free_port}"]) == 0
        assert tools.wait_port(str(port), 1.0) == 0
    assert tools.wait_port(str(port), 0.2) == 1
