"""What cluster/local.sh does in Python: ports, waiting, one chat, and finding the cluster's own processes.

Standard library and the openai client only; Linux (it reads /proc).
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "DSPARK_LOCAL_CLUSTER"


def check_ports(addresses: list[str]) -> int:
    """Say which of the addresses ([host:]port) cannot be listened on; the exit status tells whether any."""
    status = 0
    for address in addresses:
        host, _, port = address.rpartition(":")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host or "127.0.0.1", int(port)))
            except OSError as error:
                print(f"port {port} is taken ({error.strerror})", file=sys.stderr)
                status = 1
    return status


def wait_port(port: str, timeout_s: float) -> int:
    """Wait until something listens on a local port; the exit status is 1 if nothing does in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", int(port))) == 0:
                return 0
        time.sleep(0.05)
    return 1


def cluster_processes(state: str, known: dict[int, str] | None = None) -> dict[int, str]:
    """Processes that carry this state folder's mark in their environment, and all their descendants.

    Setting a process title overwrites a process's visible environment, hence the descendants; and hence also
    orphans with open files in the Ray folder (``state/ray``), which finds Ray's agents when the raylet
    that started them has died.

    Args:
        state: The state folder.
        known: Processes found earlier; they and their descendants count even when their parents have ended.

    Returns:
        Id and start time, which together name a process for good, of all that run.
    """
    mark = f"{MARK}={state}".encode()
    ray_folder = Path(state) / "ray"
    logs = f"{ray_folder.resolve()}/" if ray_folder.is_symlink() else None
    parents: dict[int, int] = {}
    starts: dict[int, str] = {}
    found: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] == "Z":  # ended, and only waits for its parent to notice
                continue
            parents[pid], starts[pid] = int(fields[1]), fields[19]
            marked = mark in (folder / "environ").read_bytes().split(b"\0")
            if marked or (logs is not None and parents[pid] == 1 and _has_open(folder, logs)):
                found.add(pid)
        except OSError:  # gone meanwhile, or another user's
            continue
    found |= {pid for pid, start in (known or {}).items() if starts.get(pid) == start}
    while children := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= children
    return {pid: starts[pid] for pid in sorted(found - {os.getpid()}) if pid in starts}


def _has_open(process: Path, prefix: str) -> bool:
    """Whether a process (its folder in /proc) has a file open whose path begins so."""
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if str(descriptor.readlink()).startswith(prefix):
                return True
    return False


def stop(state: str, polite_s: float = 15.0) -> int:
    """End the cluster's processes: politely, then for good. The exit status is 1 if any is left."""
    running = cluster_processes(state)
    for sig, patience_s in ((signal.SIGTERM, polite_s), (signal.SIGKILL, 60.0)):
        deadline = time.monotonic() + patience_s
        signalled: set[int] = set()
        while running and time.monotonic() < deadline:
            for pid in running.keys() - signalled:  # also those that appear while others end
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sig)
            signalled |= running.keys()
            time.sleep(0.2)
            running = cluster_processes(state, running)
    if running:
        print(f"still running: {sorted(running)}", file=sys.stderr)
    return int(bool(running))


def _applications(dashboard: str) -> dict[str, Any]:
    """Serve's applications, from the dashboard's REST API."""
    request = urllib.request.Request(  # noqa: S310 - the URL is local.sh's own
        f"{dashboard}/api/serve/applications/",
        headers={"Authorization": f"Bearer {os.environ['RAY_AUTH_TOKEN']}"},
    )
    with urllib.request.urlopen(request, timeout=10) as response:  # noqa: S310
        applications: dict[str, Any] = json.load(response)["applications"]
    return applications


def wait(dashboard: str, timeout_s: float) -> int:
    """Print the deployments' states as they change, until all run or one has failed."""
    started = time.monotonic()
    last = ""
    while True:
        try:
            applications = _applications(dashboard)
        except (urllib.error.URLError, OSError, KeyError, ValueError) as error:
            applications, line = {}, f"no answer from the dashboard yet ({error})"
        else:
            line = "; ".join(_describe(app) for app in applications.values()) or "nothing is deployed"
        if line != last:
            print(f"  {time.monotonic() - started:4.0f} s  {line}", flush=True)
            last = line
        statuses = [app["status"] for app in applications.values()]
        if statuses and all(status == "RUNNING" for status in statuses):
            return 0
        failed = [app for app in applications.values() if app["status"] in ("DEPLOY_FAILED", "UNHEALTHY")]
        if failed or time.monotonic() - started >= timeout_s:
            for app in failed:
                print(app["message"], *_messages(app), sep="\n", file=sys.stderr)
            return 1
        time.sleep(1)


def wait_gone(dashboard: str, timeout_s: float) -> int:
    """Wait until no application is left, which is when the last stream has ended; 1 if some are in time."""
    deadline = time.monotonic() + timeout_s
    while _applications(dashboard):
        if time.monotonic() > deadline:
            return 1
        time.sleep(0.5)
    return 0


def _describe(app: dict[str, Any]) -> str:
    """One application in a line: its status and how many replicas of each deployment run."""
    parts = [f"{app['name']} {app['status']}"]
    for name, deployment in app["deployments"].items():
        replicas = deployment["replicas"]
        running = sum(replica["state"] == "RUNNING" for replica in replicas)
        parts.append(f"{name} {running}/{deployment['target_num_replicas']}")
    return "  ".join(parts)


def _messages(app: dict[str, Any]) -> list[str]:
    """What the deployments of an application complain about."""
    return [f"{name}: {d['message']}" for name, d in app["deployments"].items() if d["message"]]


def chat(url: str, question: str) -> int:
    """Stream one answer of the first model to the terminal, and say how fast it came."""
    import openai

    with openai.OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"), timeout=300) as client:
        model = client.models.list().data[0].id
        print(f"\n{model} is asked: {question}\n", flush=True)
        started = time.monotonic()
        first = tokens = 0.0
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=128,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            if chunk.usage:
                tokens = chunk.usage.completion_tokens
            if chunk.choices and chunk.choices[0].delta.content:
                first = first or time.monotonic()
                print(chunk.choices[0].delta.content, end="", flush=True)
    decode_s = time.monotonic() - first
    print(
        f"\n\n{tokens:.0f} tokens, the first after {first - started:.2f} s, "
        f"then {(tokens - 1) / decode_s:.1f} tokens/s\n"
    )
    return int(tokens == 0)


def print_processes(state: str) -> int:
    """Print the cluster's processes, one a line."""
    for pid in cluster_processes(state):
        print(pid)
    return 0


# command: (function, names of its string arguments, whether it takes --timeout-s)
COMMANDS: dict[str, tuple[Callable[..., int], tuple[str, ...], bool]] = {
    "wait-port": (wait_port, ("port",), True),
    "processes": (print_processes, ("state",), False),
    "stop": (stop, ("state",), False),
    "wait": (wait, ("dashboard",), True),
    "wait-gone": (wait_gone, ("dashboard",), True),
    "chat": (chat, ("url", "question"), False),
}


def main() -> int:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check-ports").add_argument("addresses", nargs="+")
    for name, (_, arguments, timed) in COMMANDS.items():
        command = commands.add_parser(name)
        for argument in arguments:
            command.add_argument(argument)
        if timed:
            command.add_argument("--timeout-s", type=float, default=10.0)
    given = vars(parser.parse_args())
    name = given.pop("command")
    return check_ports(**given) if name == "check-ports" else COMMANDS[name][0](**given)


if __name__ == "__main__":
    sys.exit(main())
