"""Steps of load on a running deployment, and what the control plane makes of them.

    python -m dspark_ray.bench.load_steps --model busy --steps 1:15,16:90,1:60 --out DIR

Keeps so many streams under way for so many seconds each, and reads from Redis meanwhile what ``dspark-ray top``
shows: load, tau, verify length, replicas of each role and the autoscaling policy's reasons. Prints them as a
time series with a summary, and saves ``load_steps.csv`` and ``load_steps.png``. A failed request is status 1.
"""

import asyncio
import contextlib
import csv
import itertools
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import click
import openai

from dspark_ray.config import ControlConfig, TelemetryConfig
from dspark_ray.control.telemetry import STORE_ERRORS, TelemetryStore
from dspark_ray.control.view import ClusterView, ClusterWatcher, ModelView

LOOK_INTERVAL_S = 0.2
PRINT_INTERVAL_S = 1.0
RATE_WINDOW_S = 1.0
TOPICS = ("a lighthouse", "a clockmaker", "two rivers", "an old map", "the first snow", "a lost letter")


@dataclass(frozen=True, slots=True)
class Step:
    """So many streams for so long."""

    streams: int
    seconds: float

    @classmethod
    def parse(cls, text: str) -> "list[Step]":
        """Steps out of ``streams:seconds,streams:seconds``.

        Raises:
            ValueError: it is something else.
        """
        return [cls(int(n), float(s)) for n, s in (part.split(":") for part in text.split(","))]


@dataclass(frozen=True, slots=True)
class Row:
    """One model at one moment; over several verifiers tau is the highest, lengths are means of those that speak."""

    seconds: float
    streams: int
    """Offered to the loaded model."""
    model: str
    verifiers: int
    drafters: int
    prefills: int
    load: float
    tau: float
    local: int
    """Verifiers that follow their own load, no policy being valid."""
    verify_len: float
    accept_len: float
    running: int
    waiting: int
    kv_share: float
    tokens_per_s: float


def row_of(model: ModelView, seconds: float, streams: int) -> Row:
    """A model's row out of what the watcher saw."""
    verifiers = [r for r in model.replicas if r.role == "verifier"]
    speaking = [r for r in verifiers if r.tokens_per_s > 0]

    def mean(name: str, of: Sequence[Any]) -> float:
        return sum(getattr(r, name) for r in of) / len(of) if of else 0.0

    return Row(
        seconds=round(seconds, 2),
        streams=streams,
        model=model.model,
        verifiers=len(verifiers),
        drafters=sum(r.role == "drafter" for r in model.replicas),
        prefills=sum(r.role == "prefill" for r in model.replicas),
        load=max((r.load or 0.0 for r in verifiers), default=0.0),
        tau=max((r.tau for r in verifiers), default=0.0),
        local=sum(r.tau_source == "local" for r in verifiers),
        verify_len=mean("verify_len", speaking),
        accept_len=mean("accept_len", speaking),
        running=sum(r.running for r in verifiers),
        waiting=sum(r.waiting for r in verifiers),
        kv_share=mean("kv_share", verifiers),
        tokens_per_s=sum(r.tokens_per_s for r in verifiers),
    )


class Load:
    """Streams that are always under way; one that ends is followed by another.

    Args:
        client: of the deployment; it must not retry.
        model: asked for in every request.
        max_tokens: length of every answer.
    """

    def __init__(self, client: openai.AsyncOpenAI, model: str, max_tokens: int):
        self._client, self._model, self._max_tokens = client, model, max_tokens
        self._workers: list[asyncio.Task[None]] = []
        self._topics = itertools.cycle(TOPICS)
        self.finished = 0
        self.failures: list[str] = []

    async def set(self, streams: int) -> None:
        """Keep so many streams from now on; surplus ones are left, as clients leave."""
        surplus, self._workers = self._workers[streams:], self._workers[:streams]
        for worker in surplus:
            worker.cancel()
        await asyncio.gather(*surplus, return_exceptions=True)
        while len(self._workers) < streams:
            self._workers.append(asyncio.create_task(self._work()))

    async def _work(self) -> None:
        while True:
            try:
                await self._ask(f"Tell me a long story about {next(self._topics)}.")
                self.finished += 1
            except (openai.OpenAIError, ValueError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.5)

    async def _ask(self, prompt: str) -> None:
        stream = await self._client.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=self._max_tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async with stream:
            reasons = [c.finish_reason async for chunk in stream for c in chunk.choices if c.finish_reason]
        if reasons != ["length"]:
            raise ValueError(f"a stream ended with {reasons}")


class Reporter:
    """Prints the series, and each change of replicas or of the autoscaling policy's mind when it happens."""

    def __init__(self, model: str):
        self._model = model
        self._printed_at_s = float("-inf")
        self._sizes: dict[tuple[str, str], int] = {}
        self._wishes: dict[tuple[str, str], int] = {}
        click.echo(
            "  time  streams  model        replicas v/d/p  load   tau  verify  accept  run wait   kv  tokens/s"
        )

    def show(self, view: ClusterView, rows: Sequence[Row]) -> None:
        """Take in one moment."""
        for row, model in zip(rows, view.models, strict=True):
            sizes = {"verifier": row.verifiers, "drafter": row.drafters, "prefill": row.prefills}
            for role, count in sizes.items():
                before = self._sizes.get((row.model, role), count)
                if count != before:
                    click.echo(f"{row.seconds:6.1f}  {row.model}: {role}s alive {before} → {count}")
                self._sizes[row.model, role] = count
            for wish in model.sizing:
                if self._wishes.get((row.model, wish.role), wish.current) != wish.wanted:
                    text = f"{wish.role} {wish.current} → {wish.wanted}: {wish.reason}"
                    click.echo(f"{row.seconds:6.1f}  {row.model}: autoscaling wants {text}")
                self._wishes[row.model, wish.role] = wish.wanted
        if rows and rows[0].seconds - self._printed_at_s >= PRINT_INTERVAL_S:
            self._printed_at_s = rows[0].seconds
            for r in rows:
                click.echo(
                    f"{r.seconds:6.1f}  {r.streams if r.model == self._model else 0:7d}  {r.model:<12.12} "
                    f"{r.verifiers:>11d}/{r.drafters}/{r.prefills}  {r.load:4.2f}  {r.tau:4.2f}"
                    f"{'L' if r.local else ' '} {r.verify_len:6.2f}  {r.accept_len:6.2f} {r.running:4d} "
                    f"{r.waiting:4d} {r.kv_share:4.0%}  {r.tokens_per_s:8.1f}"
                )


async def run_steps(
    load: Load, steps: Sequence[Step], watcher: ClusterWatcher
) -> AsyncIterator[tuple[ClusterView, list[Row]]]:
    """Play the steps and yield every look at the cluster."""
    started_s = time.monotonic()
    for step in steps:
        await load.set(step.streams)
        ends_s = time.monotonic() + step.seconds
        while time.monotonic() < ends_s:
            with contextlib.suppress(*STORE_ERRORS):
                view = await asyncio.to_thread(watcher.look)
                seconds = time.monotonic() - started_s
                yield view, [row_of(m, seconds, step.streams) for m in view.models]
            await asyncio.sleep(LOOK_INTERVAL_S)
    await load.set(0)


def summary(rows: Sequence[Row], steps: Sequence[Step], model: str) -> list[str]:
    """What each step did to tau, verify length and replicas, in words."""
    lines = []
    for name in sorted({row.model for row in rows}, key=lambda name: name != model):
        begins_s = 0.0
        for step in steps:
            of_step = [r for r in rows if r.model == name and 0 <= r.seconds - begins_s < step.seconds]
            if of_step:
                first, last, highest = of_step[0].tau, of_step[-1], max(r.tau for r in of_step)
                soon = max((r.tau for r in of_step if r.seconds - begins_s <= 1.0), default=first)
                lines.append(
                    f"{name}, {step.streams if name == model else 0} streams for {step.seconds:g} s: tau "
                    f"{first:.2f}, within 1 s {soon:.2f}, highest {highest:.2f}, at the end {last.tau:.2f}; "
                    f"verify length {_mean([r.verify_len for r in of_step if r.tokens_per_s > 0]):.2f}; "
                    f"verifiers {max(r.verifiers for r in of_step)}, drafters "
                    f"{max(r.drafters for r in of_step)} at most, {last.verifiers} and {last.drafters} at the end"
                )
            begins_s += step.seconds
    return lines


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def save(rows: Sequence[Row], folder: Path) -> None:
    """Write load_steps.csv and load_steps.png."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "load_steps.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    figure, axes = plt.subplots(4, 1, figsize=(9, 9), sharex=True)
    panels = (
        ("requests", ("streams", "running", "waiting")),
        ("tau and load", ("tau", "load")),
        ("tokens a round", ("verify_len", "accept_len")),
        ("replicas", ("verifiers", "drafters", "prefills")),
    )
    models = sorted({row.model for row in rows})
    for panel, (label, names) in zip(axes, panels, strict=True):
        for (i, model), name in itertools.product(enumerate(models), names):
            of_model = [row for row in rows if row.model == model]
            panel.plot(
                [row.seconds for row in of_model],
                [getattr(row, name) for row in of_model],
                label=f"{model}: {name}",
                linestyle=("-", "--", ":")[i % 3],
            )
        panel.set_ylabel(label)
        panel.legend(fontsize=7, loc="upper right")
    axes[-1].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(folder / "load_steps.png", dpi=110)
    plt.close(figure)


async def _measure(
    url: str, api_key: str, model: str, steps: Sequence[Step], max_tokens: int, watcher: ClusterWatcher
) -> tuple[list[Row], Load]:
    rows: list[Row] = []
    reporter = Reporter(model)
    async with openai.AsyncOpenAI(base_url=url, api_key=api_key, max_retries=0, timeout=600) as client:
        load = Load(client, model, max_tokens)
        async for view, seen in run_steps(load, steps, watcher):
            reporter.show(view, seen)
            rows += seen
    return rows, load


@click.command()
@click.option(
    "--url",
    envvar="OPENAI_BASE_URL",
    default="http://127.0.0.1:8000/v1",
    show_default=True,
    show_envvar=True,
    help="The deployment's API.",
)
@click.option("--api-key", envvar="OPENAI_API_KEY", default="none", show_envvar=True)
@click.option("--model", required=True, help="The model that gets the load.")
@click.option("--steps", "text", default="1:15,16:60,0:20", show_default=True, help="streams:seconds,...")
@click.option("--max-tokens", default=200, show_default=True, help="Length of every answer.")
@click.option("--redis-url", envvar=TelemetryConfig().redis_url_env, required=True, show_envvar=True)
@click.option("--prefix", default=TelemetryConfig().key_prefix, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("load_steps"), show_default=True)
def main(
    url: str, api_key: str, model: str, text: str, max_tokens: int, redis_url: str, prefix: str, out: Path
) -> None:
    """Offer steps of load and record what the control plane does."""
    try:
        steps = Step.parse(text)
    except ValueError:
        raise click.UsageError("--steps: such as 1:15,16:60,0:20") from None
    telemetry = TelemetryConfig(key_prefix=prefix)
    store = TelemetryStore(redis_url, telemetry, ControlConfig())
    watcher = ClusterWatcher(store, telemetry.sample_lifetime_s, time.monotonic, window_s=RATE_WINDOW_S)
    click.echo(f"{os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f}")
    rows, load = asyncio.run(_measure(url, api_key, model, steps, max_tokens, watcher))
    if not rows:
        raise click.ClickException("no replica reported: is this the deployment's Redis and key prefix?")
    save(rows, out)
    for line in summary(rows, steps, model):
        click.echo(line)
    click.echo(f"{load.finished} requests finished, {len(load.failures)} failed; series and plot in {out}")
    if load.failures:
        raise click.ClickException(load.failures[0])


if __name__ == "__main__":
    main()
