"""cluster/local.sh as the tests run it: with ports and a state folder of its own."""

import importlib.util
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
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
