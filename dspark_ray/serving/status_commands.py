"""``dspark-ray status`` and ``dspark-ray top``: the cluster in a terminal, read from Redis alone."""

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import click
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dspark_ray.config import ControlConfig, TelemetryConfig
from dspark_ray.control.telemetry import STORE_ERRORS, TelemetryStore
from dspark_ray.control.view import ClusterView, ClusterWatcher, ModelView, ReplicaView
from dspark_ray.errors import ConfigError

RATE_WINDOW_S = 1.0
FULL_WIDTH = 120
SILENT_S = 0.9
"""A replica that says nothing for this long is shown as silent."""
COLUMNS = (
    "replica", "role", "run", "wait", "kv or\nslots", "load", "tau", "verify\nlen", "accept\nlen", "waste",
    "tokens\n/s", "step\nms", "ttft\ns", "late",
)  # fmt: skip


def _store_options(command: Callable[..., None]) -> Callable[..., None]:
    """Where Redis is, as every command here asks for it."""
    defaults = TelemetryConfig()
    for option in (
        click.option(
            "--redis-url",
            envvar=defaults.redis_url_env,
            show_envvar=True,
            help="Redis of the deployment; redis://, rediss://, Sentinel or Cluster.",
        ),
        click.option(
            "--prefix", default=defaults.key_prefix, show_default=True, help="telemetry.key_prefix."
        ),
    ):
        command = option(command)
    return command


def _watcher(redis_url: str | None, prefix: str) -> ClusterWatcher:
    if not redis_url:
        raise ConfigError(f"no Redis: set {TelemetryConfig().redis_url_env} or pass --redis-url")
    telemetry = TelemetryConfig(key_prefix=prefix)
    store = TelemetryStore(redis_url, telemetry, ControlConfig())
    return ClusterWatcher(store, telemetry.sample_lifetime_s, time.monotonic)


@click.command()
@_store_options
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def status(redis_url: str | None, prefix: str, as_json: bool) -> None:
    """Show replicas, load, tau, drafter assignment and autoscaling decisions once."""
    watcher = _watcher(redis_url, prefix)
    try:
        watcher.look()
        time.sleep(RATE_WINDOW_S)
        view = watcher.look()
    except STORE_ERRORS as error:
        raise click.ClickException(f"Redis does not answer: {error}") from None
    if as_json:
        click.echo(json.dumps(_plain(view), indent=2))
    else:
        # A file or a pipe has no width of its own, and a narrow one would cut every cell.
        Console(width=None if sys.stdout.isatty() else FULL_WIDTH).print(render(view))


@click.command()
@_store_options
@click.option("--interval", default=0.5, show_default=True, type=click.FloatRange(min=0.1), help="Seconds.")
@click.option("--updates", type=click.IntRange(min=1), help="End after so many updates.")
def top(redis_url: str | None, prefix: str, interval: float, updates: int | None) -> None:
    """Watch the cluster live. Ctrl-C ends it."""
    watcher = _watcher(redis_url, prefix)
    shown = 0
    with Live(Text("reading ..."), refresh_per_second=8, screen=updates is None) as live:
        try:
            while updates is None or shown < updates:
                live.update(_look(watcher))
                shown += 1
                time.sleep(interval)
        except KeyboardInterrupt:
            return


def _look(watcher: ClusterWatcher) -> RenderableType:
    try:
        return render(watcher.look())
    except STORE_ERRORS as error:
        return Text(f"Redis does not answer: {type(error).__name__}; trying again", style="bold red")


def _plain(view: ClusterView) -> dict[str, Any]:
    plain = dataclasses.asdict(view)
    for model, source in zip(plain["models"], view.models, strict=True):
        model["sizing"] = [{field: getattr(d, field) for field in d.__struct_fields__} for d in source.sizing]
    return plain


def render(view: ClusterView) -> RenderableType:
    """The cluster as tables."""
    ruler = (
        Text(f"scheduler {view.ruler[:12]} rules, epoch {view.epoch}")
        if view.ruler
        else Text("no scheduler rules: every replica follows its own load", style="bold yellow")
    )
    if not view.models:
        return Group(ruler, Text("no replica reports", style="bold yellow"))
    return Group(ruler, *(part for model in view.models for part in _model(model)))


def _model(model: ModelView) -> list[RenderableType]:
    speed = sum(r.tokens_per_s for r in model.replicas if r.role == "verifier")
    table = Table(
        title=f"{model.model}: {speed:.1f} tokens/s",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in COLUMNS:
        left = column in {"replica", "role"}
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for replica in model.replicas:
        silent = replica.silent_s >= SILENT_S
        table.add_row(
            *_row(replica), style="dim" if silent else "yellow" if replica.tau_source == "local" else ""
        )
    parts: list[RenderableType] = [table]
    if model.drafters:
        shares = ", ".join(f"{_short(name)} {weight:.0%}" for name, weight in model.drafters.items())
        parts.append(Text(f"new requests go to drafters: {shares}"))
    parts += [Text(f"{d.role}: {d.current} → {d.wanted} replicas ({d.reason})") for d in model.sizing]
    drifting = [r for r in model.replicas if r.drift > ControlConfig().drift_limit]
    parts += [
        Text(f"{_short(r.replica)}: confidence is off by {r.drift:.2f}, calibrate the drafter", style="red")
        for r in drifting
    ]
    return parts


def _short(replica: str) -> str:
    """A replica's own part of its name."""
    return replica.rsplit("/", 1)[-1][-12:]


def _row(r: ReplicaView) -> list[str]:
    speculating = r.role == "verifier" and r.verify_len > 0
    if r.slots_total:
        memory = f"{r.slots_used}/{r.slots_total}"
    else:
        memory = f"{r.kv_share:.0%}" if r.role in {"prefill", "verifier"} else ""
    return [
        _short(r.replica),
        r.role if r.silent_s < SILENT_S else f"{r.role}, silent {r.silent_s:.0f} s",
        str(r.running),
        str(r.waiting),
        memory,
        "" if r.load is None else f"{r.load:.2f}",
        f"{r.tau:.2f}{' local' if r.tau_source == 'local' else ''}" if r.tau_source else "",
        f"{r.verify_len:.2f}" if speculating else "",
        f"{r.accept_len:.2f}" if speculating else "",
        f"{r.waste:.0%}" if speculating else "",
        f"{r.tokens_per_s:.1f}" if r.tokens_per_s else "",
        f"{r.step_time_s * 1e3:.1f}" if r.step_time_s else "",
        f"{r.ttft_s:.2f}" if r.ttft_s else "",
        f"{r.miss_share:.1%}" if r.role in {"drafter", "verifier"} and r.miss_share else "",
    ]
