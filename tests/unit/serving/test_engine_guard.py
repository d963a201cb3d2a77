"""Nothing of an engine outlives its replica."""

import subprocess
import sys

import psutil
import pytest

REPLICA = """
import subprocess, sys
from dspark_ray.serving.engine_guard import guard_children
engine = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"])
guard = guard_children()
print(engine.pid, flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("killed", [False, True], ids=["ends", "is killed"])
def test_an_engine_that_hangs_dies_with_its_replica(killed: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", REPLICA], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as replica:
        engine = psutil.Process(int(replica.stdout.readline()))
        if killed:
            replica.kill()
        replica.communicate(None if killed else "end\n", timeout=60)
    psutil.wait_procs([engine], timeout=20)
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
