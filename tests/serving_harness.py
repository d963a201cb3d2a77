"""A running application for tests: real Ray, real Serve, real vLLM, seen from outside as a client sees it."""

import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import psutil

from dspark_ray.serving.ports import free_port_range

REPO = Path(__file__).resolve().parent.parent
RUN_MARK = "DSPARK_TEST_RUN"
START_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0


class RunningApp:
    """One application, its cluster and the ways into it."""

    def __init__(self, process: subprocess.Popen[str], port: int, log: Path):
        self._process = process
        self._log = log
        self._clients: list[openai.OpenAI] = []
        self.base_url = f"http://127.0.0.1:{port}"

    def client(self, **options: Any) -> openai.OpenAI:
        """The official client, closed with the app. It never retries: each failure is to be seen."""
        defaults = {"api_key": "none", "max_retries": 0, "timeout": 120.0}
        # Kept, since one that is collected unclosed is a warning in whatever test runs just then.
        self._clients.append(openai.OpenAI(base_url=f"{self.base_url}/v1", **(defaults | options)))
        return self._clients[-1]

    def close_clients(self) -> None:
        """Close the clients that were handed out."""
        for client in self._clients:
            client.close()

    def call(self, deployment: str, method: str, *args: Any) -> Any:
        """Call a method of one replica of a deployment by its Serve handle."""
        return self._command({"do": "call", "deployment": deployment, "method": method, "args": args})

    def replica_states(self) -> dict[str, dict[str, int]]:
        """Number of replicas by state, for each deployment."""
        return self._command({"do": "states"})

    def drill(self, file: Path, function: str, *args: Any) -> Any:
        """Run a function of a file inside the driver, which is a client of the same Ray cluster."""
        return self._command({"do": "drill", "file": str(file), "function": function, "args": args})

    def deploy(self, args: dict[str, Any], *deployments: dict[str, Any]) -> None:
        """Deploy a changed configuration as ``serve deploy`` does; only for an app that was started declaratively."""
        self._command({"do": "deploy", "args": [args, list(deployments)]})

    def speculate(self, mode: str | None = None, model: str = "smollm2", **setting: Any) -> Any:
        """Set how the model's verifiers speculate: a mode, "off", or None for what is configured."""
        drills = REPO / "tests" / "serve" / "drills.py"
        return self.drill(drills, "speculate", model, {"mode": mode, **setting})

    def stats(self, deployment: str) -> dict[str, Any]:
        """Counters of one replica."""
        return self.call(deployment, "stats")

    def all_stats(self, deployment: str) -> list[dict[str, Any]]:
        """Counters of every replica that runs."""
        return self._command({"do": "call_all", "deployment": deployment, "method": "stats"})

    def _command(self, command: dict[str, Any]) -> Any:
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self.read_reply(ANSWER_TIMEOUT_S)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def read_reply(self, timeout_s: float) -> Any:
        """The driver's next answer."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            ready = selector.select(timeout_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            state = "ended" if self._process.poll() is not None else "did not answer"
            raise RuntimeError(f"the driver {state}; end of its log:\n{self._log.read_text()[-6000:]}")
        return json.loads(line)


@contextmanager
def running_app(
    args: dict[str, Any],
    driver: Path = REPO / "tests" / "serving_driver.py",
    *options: str,
    **environ: str,
) -> Iterator[RunningApp]:
    """Start an application of the given `AppConfig` and stop it, with all its processes, at the end.

    With DSPARK_TEST_LOGS set, its logs are copied to that folder before they are removed.

    Args:
        args: of the application.
        driver: the process that runs it.
        options: of the driver.
        environ: of all its processes.
    """
    # Ray's socket paths must stay short, so not pytest's own temporary folder.
    folder = Path(tempfile.mkdtemp(prefix="serve-test-"))
    args_file, log = folder / "args.json", folder / "driver.log"
    args_file.write_text(json.dumps(args))
    port = free_port_range()
    env = {
        **os.environ,
        "RAY_AUTH_MODE": "disabled",
        "PYTHONPATH": str(REPO),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray would kill replicas when other programs take the memory of the machine.
        "RAY_memory_monitor_refresh_ms": "0",
        # And would start them behind everything else on it.
        "RAY_worker_niceness": "0",
        RUN_MARK: folder.name,
        **environ,
    }
    env.pop("RAY_ADDRESS", None)
    command = [sys.executable, str(driver), str(args_file), str(port)]
    with log.open("w") as log_file:
        process = subprocess.Popen(
            [*command, str(folder / "ray"), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_file,
            text=True,
            env=env,
        )
    app = RunningApp(process, port, log)
    try:
        app.read_reply(START_TIMEOUT_S)
        yield app
    finally:
        app.close_clients()
        _stop(process, folder.name)
        if keep := os.environ.get("DSPARK_TEST_LOGS"):
            shutil.copytree(
                folder, Path(keep) / folder.name, ignore=shutil.ignore_patterns("sockets", "*.so")
            )
        shutil.rmtree(folder, ignore_errors=True)


def _stop(process: subprocess.Popen[str], mark: str) -> None:
    """End the driver, then whatever of its cluster is left: all that inherited the run's mark."""
    process.stdin.close()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
    # Twice: the first round's processes may have been starting others.
    for _ in range(2):
        left = [other for other in psutil.process_iter() if _environ(other).get(RUN_MARK) == mark]
        for other in left:
            with suppress(psutil.NoSuchProcess):
                other.kill()
        psutil.wait_procs(left, timeout=10)


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str, every_s: float = 0.1) -> Any:
    """Poll until the condition is true and return its value.

    Raises:
        AssertionError: naming ``what`` did not happen.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(every_s)
