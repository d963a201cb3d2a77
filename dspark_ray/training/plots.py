"""The learning curve of a run."""

import json
from pathlib import Path
from typing import Any


def plot_run(run_dir: Path) -> None:
    """Write learning.png from a run's metrics.jsonl: accept length and loss terms over steps."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    records = [
        json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))

    def draw(axes: Any, kind: str, name: str, **style: Any) -> None:
        rows = [r for r in records if r["kind"] == kind]
        axes.plot([r["step"] for r in rows], [r[name] for r in rows], **style)

    draw(left, "train", "greedy_accept_len", label="training answers", alpha=0.5)
    draw(left, "validation", "greedy_accept_len", label="held-out greedy answers", marker="o")
    left.set(xlabel="step", ylabel="accept length, teacher-forced")
    left.legend()
    for name in ("ce", "kl", "tv", "confidence_bce"):
        draw(right, "train", name, label=name)
    right.set(xlabel="step", ylabel="loss term", yscale="log")
    right.legend()
    figure.tight_layout()
    figure.savefig(run_dir / "learning.png", dpi=110)
    plt.close(figure)
