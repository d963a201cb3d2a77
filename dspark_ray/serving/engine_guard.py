"""An engine does not outlive its replica.

vLLM's engine processes do not notice when the replica that started them is killed; they would keep their memory
and their cores, or their GPU, from the replica that Serve starts in its place.
"""

import subprocess
import sys
from pathlib import Path

import psutil

# Waits until nobody holds the other end of its stdin, then kills the processes it was told: pid:start time.
GUARD = """
import os, signal, sys
sys.stdin.read()
for argument in sys.argv[1:]:
    pid, _, started = argument.partition(":")
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            if file.read().rpartition(")")[2].split()[19] == started:
                os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass
"""


def guard_children() -> "subprocess.Popen[bytes]":
    """Start a process that kills those below this one as soon as this one is gone, however it goes.

    Returns:
        That process, to be kept; it also acts when its stdin is closed.
    """
    children = psutil.Process().children(recursive=True)
    names = [f"{child.pid}:{_started(child.pid)}" for child in children]
    # A session of its own, so that no signal to the replica's group ends it first.
    return subprocess.Popen(  # noqa: S603 - this interpreter, our own lines
        [sys.executable, "-S", "-c", GUARD, *names], stdin=subprocess.PIPE, start_new_session=True
    )


def _started(pid: int) -> str:
    """When a process started, which together with its number names it for good; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""
