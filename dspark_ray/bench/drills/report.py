"""Verdicts as a table for people."""

from typing import Any

COLUMNS = ("drill", "requests", "failed", "wrong", "back after", "slowest", "verdict", "metrics said")


def table(verdicts: dict[str, Any]) -> str:
    """A Markdown table, one line for each drill."""
    rows = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for name, v in verdicts.items():
        back = "never" if v["recovered_s"] is None else f"{v['recovered_s']:.0f} s"
        failed = v["failed"] + v["hung"] + v["cut"]
        said = ", ".join(f"{what} {value:g}" for what, value in v["metrics"].items())
        cells = [name, v["requests"], failed, v["wrong"], back, f"{v['slowest_s']:.0f} s",
                 "passed" if v["passed"] else "; ".join(v["why"]), said or "nothing"]  # fmt: skip
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)
