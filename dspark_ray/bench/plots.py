"""The figures of a report, as SVG."""

import io
from collections.abc import Callable, Sequence
from typing import Any

from dspark_ray.bench.results import Results, Row
from dspark_ray.errors import ConfigError

Draw = Callable[[Any, Results, Sequence[Row]], None]
"""Draws into axes; leaves them without data where the run has none."""


def figures(results: Results, rows: Sequence[Row]) -> dict[str, str]:
    """Title and SVG of each figure that the run has data for.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError("reports are drawn with matplotlib: pip install 'dspark-ray[train]'") from None
    mpl.use("agg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "dspark", "font.size": 9})
    from matplotlib import pyplot as plt

    drawn = {}
    for title, draw in FIGURES.items():
        figure, axes = plt.subplots(figsize=(7.2, 4.2))
        draw(axes, results, rows)
        if axes.has_data():
            axes.grid(visible=True, alpha=0.3)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=8)
            figure.tight_layout()
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", metadata={"Date": None})
            svg = buffer.getvalue()
            drawn[title] = svg[svg.index("<svg") :]
        plt.close(figure)
    return drawn


def _color(results: Results, arm: str) -> str:
    return f"C{results.arm_names.index(arm) % 10}"


def _of(rows: Sequence[Row], arm: str) -> list[Row]:
    return [row for row in rows if row.arm == arm]


def _pareto(axes: Any, results: Results, rows: Sequence[Row]) -> None:
    for arm in results.arm_names:
        points = [r for r in _of(rows, arm) if r.user_tokens_per_s]
        if not points:
            continue
        axes.plot(
            [r.user_tokens_per_s for r in points],
            [r.tokens_per_s for r in points],
            "o-",
            color=_color(results, arm),
            label=arm,
            alpha=0.8,
        )
        for r in points:
            axes.annotate(
                r.offer.split()[0],
                (r.user_tokens_per_s, r.tokens_per_s),
                fontsize=7,
                xytext=(3, 3),
                textcoords="offset points",
            )
    axes.set(xlabel="tokens/s of one stream, after its first token (median)", ylabel="tokens/s, all streams")


def _over_loads(
    axes: Any, results: Results, rows: Sequence[Row], value: Callable[[Row], float | None]
) -> None:
    labels = results.offer_labels
    for arm in results.arm_names:
        points = [(labels.index(r.offer), number) for r in _of(rows, arm) if (number := value(r)) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=_color(results, arm), label=arm, alpha=0.8)
    axes.set_xticks(range(len(labels)), labels)


def _verify_len(axes: Any, results: Results, rows: Sequence[Row]) -> None:
    _over_loads(axes, results, rows, lambda r: r.counts.verify_len if r.counts else None)
    axes.set(ylabel="verified drafts per request and step")


def _tau(axes: Any, results: Results, rows: Sequence[Row]) -> None:
    _over_loads(axes, results, rows, lambda r: r.counts.tau if r.counts else None)
    axes.set(ylabel="tau (mean over the run)", ylim=(0, 1))


def _bars(axes: Any, results: Results, rows: Sequence[Row], value: Callable[[Row], float | None]) -> None:
    labels, arms = results.offer_labels, results.arm_names
    width = 0.8 / max(1, len(arms))
    for number, arm in enumerate(arms):
        bars = [
            (labels.index(r.offer) + (number - (len(arms) - 1) / 2) * width, height)
            for r in _of(rows, arm)
            if (height := value(r)) is not None
        ]
        if bars:
            axes.bar(*zip(*bars, strict=True), width, color=_color(results, arm), label=arm)
    axes.set_xticks(range(len(labels)), labels)


def _goodput(axes: Any, results: Results, rows: Sequence[Row]) -> None:
    _bars(axes, results, rows, lambda r: r.goodput_tokens_per_s)
    axes.set(ylabel=f"tokens/s of requests within {results.sla_ms:g} ms a token")


def _waste(axes: Any, results: Results, rows: Sequence[Row]) -> None:
    _bars(axes, results, rows, lambda r: r.counts.waste if r.counts else None)
    axes.set(ylabel="rejected share of verified drafts", ylim=(0, 1))


def _speedup(axes: Any, results: Results, rows: Sequence[Row]) -> None:
    baseline = results.baselines[0]

    def ratio(row: Row) -> float | None:
        return row.ratios[baseline].median if baseline in row.ratios else None

    _over_loads(axes, results, rows, ratio)
    if axes.has_data():
        axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(ylabel=f"tokens/s relative to {baseline} (median of rounds)")


def _acceptance(axes: Any, results: Results, rows: Sequence[Row]) -> None:
    for arm in results.arm_names:
        counts = [r.counts for r in _of(rows, arm) if r.counts and r.counts.acceptance_at]
        if counts:
            shares = sum(counts[1:], counts[0]).acceptance_at
            axes.plot(
                range(1, len(shares) + 1), shares, "o-", color=_color(results, arm), label=arm, alpha=0.8
            )
            axes.set_xticks(range(1, max(len(shares), len(axes.get_xticks())) + 1))
    axes.set(xlabel="position in the block", ylabel="acceptance, given the positions before", ylim=(0, 1))


def _step_cost(axes: Any, results: Results, rows: Sequence[Row]) -> None:
    for arm in results.arm_names:
        points = [
            (r.counts.tokens_per_step, r.counts.step_ms)
            for r in _of(rows, arm)
            if r.counts and r.counts.step_ms and r.counts.tokens_per_step
        ]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=_color(results, arm), label=f"{arm}, measured")
    tables = [turn for turn in results.turns if turn.step_table[0]]
    for arm in results.arm_names:
        last = next((turn.step_table for turn in reversed(tables) if turn.arm == arm), None)
        if last:
            axes.plot(*last, "-", color=_color(results, arm), linewidth=1, alpha=0.6)
    axes.set(
        xlabel="tokens in a step (log)", ylabel="ms a step, without drafting; lines: the table", xscale="log"
    )


FIGURES: dict[str, Draw] = {
    "Per-user speed against total throughput": _pareto,
    "Speed relative to the baseline": _speedup,
    "Goodput": _goodput,
    "Verify length": _verify_len,
    "tau": _tau,
    "Conditional acceptance by position": _acceptance,
    "Waste": _waste,
    "Step cost, measured against the table that the scheduler uses": _step_cost,
}
