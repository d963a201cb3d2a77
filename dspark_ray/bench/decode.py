"""What speculation buys: ``python -m dspark_ray.bench.decode --drafter FOLDER``.

Four engines of the same target decode the same prompts by turns, so that a busy machine is busy for all of them:
no speculation, n-gram lookup (vLLM's own), DSpark in the verifier's worker, and DSpark behind its ZeroMQ service.
Prints JSON: tokens per second relative to no speculation at each number of streams, accept length, waste, and
what a step spends on the verify pass, feature projection, transport, drafting and scheduling.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from dspark_ray.bench.prompts import MIXED, SETS
from dspark_ray.hardware import openmp_env
from dspark_ray.sources import DEMO_SOURCE, resolve_source

METHODS = ("none", "ngram", "colocated", "remote")
_SECRET = "only-for-this-benchmark"  # noqa: S105
_REPLY = "\x1eREPLY "


class Child:
    """A process that answers one JSON line with another."""

    def __init__(self, role: str, arguments: dict[str, Any]):
        environment = dict(os.environ) | {
            "DSPARK_SECRET": _SECRET, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **openmp_env(),
        }  # fmt: skip
        environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override kv_cache_memory_bytes
        if arguments["threads"]:
            environment["OMP_NUM_THREADS"] = str(arguments["threads"])
        command = [sys.executable, "-m", "dspark_ray.bench.decode_child", role, json.dumps(arguments)]
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, our own module
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.started = self.receive()

    def ask(self, **question: Any) -> Any:
        """One question, one answer."""
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self.receive()

    def receive(self) -> Any:
        """The next reply; what libraries print in between is passed over."""
        for line in self._process.stdout or ():
            if line.startswith(_REPLY):
                return json.loads(line.removeprefix(_REPLY))
        raise click.ClickException(f"a child process ended with status {self._process.wait()}")

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def reply(answer: Any) -> None:
    """Called by a child: answer its parent."""
    print(_REPLY + json.dumps(answer), flush=True)


@contextlib.contextmanager
def engines(base: dict[str, Any], methods: tuple[str, ...]) -> Iterator[dict[str, Child]]:
    """All engines, and the drafter service that the remote one uses."""
    children: dict[str, Child] = {}
    try:
        if "remote" in methods:
            children["drafter"] = Child("drafter", base)
            base = base | {"endpoint": children["drafter"].started}
        for method in methods:
            children[method] = Child("engine", base | {"method": method})
        yield children
    finally:
        for child in children.values():
            child.stop()


def compare(
    base: dict[str, Any], *, methods: tuple[str, ...], streams: tuple[int, ...], tokens: int, rounds: int
) -> dict[str, Any]:
    """Measure all methods at all numbers of streams.

    Args:
        base: target, drafter and engine settings of the children.
        methods: of METHODS; none must be among them.
        streams: requests decoded at once.
        tokens: generated for each request.
        rounds: batches of each size; other prompts each time, the same ones for every method.
    """
    report: dict[str, Any] = {}
    with engines(base, methods) as children:
        for method in methods:
            children[method].ask(streams=max(streams), first=0, tokens=8)  # warm up, outside the clock
        for count in streams:
            runs: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
            for number in range(rounds):
                for method in methods:
                    runs[method].append(
                        children[method].ask(streams=count, first=number * count, tokens=tokens)
                    )
            report[str(count)] = {method: _summary(runs[method], runs["none"]) for method in methods}
    return report


def _summary(runs: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds: each round is compared with plain decoding in the same round."""
    ratios = [p["seconds"] / r["seconds"] for r, p in zip(runs, plain, strict=True)]
    cpu = [p["cpu_seconds"] / r["cpu_seconds"] for r, p in zip(runs, plain, strict=True)]
    same = [a == b for r, p in zip(runs, plain, strict=True) for a, b in zip(r["ids"], p["ids"], strict=True)]
    summary: dict[str, Any] = {
        "tokens_per_s": round(sum(r["tokens"] for r in runs) / sum(r["seconds"] for r in runs), 1),
        "speedup": round(statistics.median(ratios), 3),
        # of the engine's process: what the ratio would be if it did not share its cores
        "speedup_by_cpu_time": round(statistics.median(cpu), 3),
        "same_text": f"{sum(same)}/{len(same)}",
        "tokens_per_step": round(sum(r["tokens"] for r in runs) / sum(r["steps"] for r in runs), 3),
    }
    if not any("shim" in r for r in runs):
        return summary
    total: dict[str, float] = {}
    for run in runs:
        for name, value in run["shim"].items():
            total[name] = total.get(name, 0.0) + value
    steps, rounds = max(total["steps"], 1), max(total["rounds"], 1)
    return summary | {
        "accept_len": round(1 + total["tokens_accepted"] / rounds, 3),
        "wasted_share": round(total["tokens_wasted"] / max(total["tokens_verified"], 1), 3),
        "steps_skipped_share": round(total["steps_skipped"] / steps, 3),
        "bytes_per_step": round(total["bytes_sent"] / steps),
        "deadline_misses": int(total["deadline_misses"]),
        "ms_per_step": {
            "verify": round(total["verify_ms"] / steps, 2),
            "features": round(total["feature_ms"] / steps, 2),
            "draft": round(total["draft_ms"] / steps, 2),
            "transport": round(total["transport_ms"] / steps, 2),
            "schedule": round(total["schedule_ms"] / steps, 2),
            "between_steps": round(total["between_ms"] / steps, 2),
        },
    }


@click.command()
@click.option(
    "--drafter", type=click.Path(path_type=Path, exists=True), required=True, help="Draft checkpoint."
)
@click.option(
    "--target", default=DEMO_SOURCE, show_default=True, help="Folder of the target, or demo:smollm2."
)
@click.option("--dataset", default=MIXED, show_default=True, help=f"{', '.join([*SETS, MIXED])}, or a file.")
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--mode", default="tau+throughput", show_default=True, help="Verify mode (scheduling.mode).")
@click.option("--tau", default=0.2, show_default=True)
@click.option("--block-size", default=None, type=int, help="Drafts a round; the checkpoint's when unset.")
@click.option("--streams", default="1,4,16", show_default=True)
@click.option("--methods", default=",".join(METHODS), show_default=True)
@click.option("--tokens", default=64, show_default=True, help="Generated for each request.")
@click.option("--rounds", default=4, show_default=True, help="Batches of each size.")
@click.option(
    "--threads", default=0, show_default=True, help="Threads of each engine and drafter; 0: all cores."
)
def main(
    drafter: Path, target: str, streams: str, methods: str, tokens: int, rounds: int, **settings: Any
) -> None:
    """Compare no speculation, ngram, colocated and remote DSpark."""
    names = tuple(methods.split(","))
    if "none" not in names or not set(names) <= set(METHODS):
        raise click.BadParameter(f"--methods: none, and any of {', '.join(METHODS)}")
    base = {"drafter": str(drafter), "target": resolve_source(target, "--target")} | {
        name: str(value) if isinstance(value, Path) else value for name, value in settings.items()
    }
    counts = tuple(int(count) for count in streams.split(","))
    began = time.monotonic()
    report = compare(base, methods=names, streams=counts, tokens=tokens, rounds=rounds)
    click.echo(
        json.dumps(
            {"settings": base, "streams": report, "seconds": round(time.monotonic() - began)}, indent=1
        )
    )


if __name__ == "__main__":
    main()
