"""Results as a Markdown table and as one self-contained HTML page."""

import html
from collections.abc import Callable, Sequence
from pathlib import Path

from dspark_ray.bench.plots import figures
from dspark_ray.bench.results import Ratio, Results, Row, summary
from dspark_ray.errors import ConfigError

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}td,th{padding:.2rem .6rem;
border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}td:first-child,th:first-child,td:nth-child(2),
th:nth-child(2){text-align:left}figure{margin:1.5rem 0}svg{max-width:100%;height:auto}dt{font-weight:600}
figure+figure{border-top:1px solid #eee}.bad{color:#b00}"""

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

Column = tuple[str, Callable[[Row], str]]


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio.median:.2f}× ({ratio.lowest:.2f}–{ratio.highest:.2f})"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _three(values: dict[str, float]) -> str:
    return " / ".join(f"{value:.0f}" for value in values.values())


def _main_columns(results: Results) -> list[Column]:
    columns: list[Column] = [
        ("load", lambda r: r.offer),
        ("arm", lambda r: r.arm),
        ("tokens/s", lambda r: _number(r.tokens_per_s)),
        ("per user", lambda r: _number(r.user_tokens_per_s)),
        ("TTFT p50, ms", lambda r: _number(r.ttft_ms.get("p50"), 0)),
    ]

    def against(baseline: str) -> Column:
        return f"× {baseline}", lambda r: _ratio(r.ratios.get(baseline))

    first = results.baselines[0]
    return [
        *columns,
        *map(against, results.baselines),
        (f"per user × {first}", lambda r: _ratio(r.user_ratios.get(first))),
        ("accept length", lambda r: _number(r.counts.accept_len, 2) if r.counts else ""),
        ("verify length", lambda r: _number(r.counts.verify_len, 2) if r.counts else ""),
        ("waste", lambda r: _percent(r.counts.waste) if r.counts else ""),
        ("tau", lambda r: _number(r.counts.tau, 2) if r.counts else ""),
    ]


def _latency_columns(results: Results) -> list[Column]:
    return [
        ("load", lambda r: r.offer),
        ("arm", lambda r: r.arm),
        ("TTFT p50 / p95 / p99, ms", lambda r: _three(r.ttft_ms)),
        ("per token p50 / p95 / p99, ms", lambda r: _three(r.token_ms)),
        ("between events p50 / p95 / p99, ms", lambda r: _three(r.gap_ms)),
        (f"within {results.sla_ms:g} ms a token", lambda r: _percent(r.within_sla)),
        ("goodput, tokens/s", lambda r: _number(r.goodput_tokens_per_s)),
        ("$ per million tokens", lambda r: _number(r.dollars_per_million_tokens, 2)),
        ("same text", lambda r: _percent(r.same_text)),
        ("requests", lambda r: f"{r.requests}" + (f" ({r.failed} failed)" if r.failed else "")),
        ("rounds", lambda r: str(r.rounds)),
    ]


def _step_columns() -> list[Column]:
    def part(read: Callable[[Row], float | None], digits: int = 2) -> Callable[[Row], str]:
        return lambda r: _number(read(r), digits) if r.counts and r.counts.steps else ""

    def per_step(name: str) -> Callable[[Row], str]:
        return part(lambda r: getattr(r.counts, name) / r.counts.steps)  # type: ignore[union-attr]

    return [
        ("load", lambda r: r.offer),
        ("arm", lambda r: r.arm),
        ("tokens a step", part(lambda r: r.counts.tokens_per_step if r.counts else None)),
        ("verify, ms", per_step("verify_ms")),
        ("between steps", per_step("between_ms")),
        ("features", per_step("feature_ms")),
        ("waiting for drafts", per_step("draft_wait_ms")),
        ("of it drafting", per_step("draft_ms")),
        ("transport", per_step("transport_ms")),
        ("scheduling", per_step("schedule_ms")),
        ("steps that drafted", lambda r: _percent(_drafted_share(r))),
        ("late drafts", lambda r: _percent(_miss_share(r))),
    ]


def _drafted_share(row: Row) -> float | None:
    return row.counts.steps_drafted / row.counts.steps if row.counts and row.counts.steps else None


def _miss_share(row: Row) -> float | None:
    counts = row.counts
    return counts.deadline_misses / counts.draft_calls if counts and counts.draft_calls else None


def _cells(columns: Sequence[Column], rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Head and body; columns that are empty everywhere are left out."""
    body = [[text(row) for _, text in columns] for row in rows]
    kept = [i for i in range(len(columns)) if any(line[i] for line in body)]
    return [columns[i][0] for i in kept], [[line[i] for i in kept] for line in body]


def markdown(results: Results) -> str:
    """The table for a README, under a line that says where and how it was measured."""
    head, body = _cells(_main_columns(results), summary(results))
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in body)]
    return "\n".join([_setting(results), "", *lines])


def put_into(text: str, tables: str) -> str:
    """A document with the tables in the place of what is between its two marks.

    Raises:
        ConfigError: it has no such place.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ConfigError(f"no {BEGIN} … {END} to put the tables into")
    return f"{before}{begin}\n\n{tables}\n\n{end}{after}"


def _setting(results: Results) -> str:
    about = results.about
    return (
        f"{about['machine']}; load average {about['load_average_before']:.1f} before, "
        f"{about['load_average_after']:.1f} after; {about['finished']}, commit {about['commit']}. "
        f"Prompts: {about['dataset']}, at most {about['max_tokens']} tokens, temperature {about['temperature']:g}, "
        f"{about['rounds']} rounds; medians of rounds, ratios round by round with their lowest and highest; "
        "tokens/s of a closed loop while all its streams are under way."
        + (f" {about['note']}" if about.get("note") else "")
    )


def _html_table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    head, body = _cells(columns, rows)
    out = ["<table><thead><tr>", *(f"<th>{html.escape(name)}</th>" for name in head), "</tr></thead><tbody>"]
    for line in body:
        out += ["<tr>", *(f"<td>{html.escape(cell)}</td>" for cell in line), "</tr>"]
    return "".join([*out, "</tbody></table>"])


def write_html(runs: Sequence[Results], path: Path) -> None:
    """Write the page: settings, tables, figures of each run. Nothing in it is loaded from elsewhere.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>dspark_ray: measured</title>',
        f"<style>{_STYLE}</style><h1>Measured</h1>",
        *map(_section, runs),
        "</html>",
    ]
    path.write_text("".join(parts), encoding="utf-8")


def _section(results: Results) -> str:
    rows = summary(results)
    faults = [f"{row.offer}, {row.arm}: {row.error}" for row in rows if row.error]
    about = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(str(value))}</dd>"
        for name, value in results.about.items()
    )
    with_steps = [row for row in rows if row.counts and row.counts.steps]
    parts = [
        f"<h2>{html.escape(', '.join(results.arm_names))}</h2><p>{html.escape(_setting(results))}</p>",
        *(f'<p class="bad">{html.escape(fault)}</p>' for fault in faults),
        _html_table(_main_columns(results), rows),
        *(
            f"<figure><h3>{html.escape(title)}</h3>{svg}</figure>"
            for title, svg in figures(results, rows).items()
        ),
        "<h3>Latency, goodput, cost</h3>",
        _html_table(_latency_columns(results), rows),
        *(["<h3>A step</h3>", _html_table(_step_columns(), with_steps)] if with_steps else []),
        f"<h3>Settings</h3><dl>{about}</dl>",
        f"<h3>Arms</h3><pre>{html.escape(chr(10).join(map(str, results.arms)))}</pre>",
    ]
    return "".join(parts)
