"""Measures of a drafter, from rounds of real speculative decoding, and their plots."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark_ray.decoding.calibration import (
    CalibrationTable,
    Scaling,
    area_under_roc,
    expected_calibration_error,
    reliability_bins,
    survivals,
)
from dspark_ray.drafter.checkpoint import load_drafter
from dspark_ray.drafter.runner import DraftRunner
from dspark_ray.errors import ConfigError
from dspark_ray.training.frozen_target import load_causal_lm
from dspark_ray.training.regenerate import open_text
from dspark_ray.training.rounds import Array, RoundRunner, Rounds

THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(20))


def read_prompt_ids(path: Path, tokenizer: Any, skip: int = 0, limit: int | None = None) -> list[list[int]]:
    """Prompts as token ids, chat template applied.

    Args:
        path: JSON lines with `turns` (the first counts), `messages`, `prompt` or `prompt_ids`.
        tokenizer: the target's.
        skip: leading lines to leave out.
        limit: most prompts.

    Raises:
        ConfigError: a line with none of these fields, or no line at all.
    """
    prompts: list[list[int]] = []
    for number, line in enumerate(open_text(path)):
        if number < skip:
            continue
        if limit is not None and len(prompts) == limit:
            break
        record = json.loads(line)
        if "prompt_ids" in record:
            prompts.append(record["prompt_ids"])
            continue
        if "messages" in record:
            messages = record["messages"]
        elif "turns" in record or "prompt" in record:
            text = record["turns"][0] if "turns" in record else record["prompt"]
            messages = [{"role": "user", "content": text}]
        else:
            raise ConfigError(f"{path}:{number + 1} has none of turns, messages, prompt, prompt_ids")
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    if not prompts:
        raise ConfigError(f"{path} has no prompt after the first {skip}")
    return prompts


def collect_rounds(
    target: Path,
    drafter: Path,
    prompts: Sequence[list[int]],
    *,
    temperature: float,
    max_new_tokens: int,
    batch_size: int,
    draft_len: int | None = None,
    window: int | None = None,
    dtype: str = "bfloat16",
    seed: int = 0,
    progress: Callable[[int], None] = lambda _count: None,
) -> Rounds:
    """Decode all prompts speculatively and join what the rounds did.

    Args:
        target: directory of the target.
        drafter: directory of the draft checkpoint.
        prompts: token ids.
        temperature: of the target.
        max_new_tokens: of each answer.
        batch_size: requests decoded together.
        draft_len: γ', the checkpoint's γ when unset.
        window: context rows that the drafter keeps; all when unset.
        dtype: of both models.
        seed: of the target's draws.
        progress: called with the number of prompts that a batch finished.
    """
    precision = getattr(torch, dtype)
    model = load_causal_lm(target, precision, "cpu")
    draft = load_drafter(drafter, target=target, dtype=precision)
    length = draft_len or draft.config.num_draft_tokens
    rows = window or max(map(len, prompts)) + max_new_tokens + length + 1
    per_slot = rows + draft.config.block_size
    slot_bytes = 4 * draft.config.num_hidden_layers * draft.config.num_key_value_heads * draft.config.head_dim
    runner = DraftRunner(
        draft,
        cache_bytes=2 * per_slot * slot_bytes * (batch_size + 1),
        window=rows,
        max_batch=batch_size,
        device="cpu",
        dtype=precision,
    )
    stops = model.generation_config.eos_token_id
    rounds = RoundRunner(
        model,
        draft.projection,
        draft.config.target_layer_ids,
        runner,
        draft_len=length,
        temperature=temperature,
        stop_ids=[stops] if isinstance(stops, int) else list(stops or []),
        seed=seed,
    )
    parts = []
    for part in rounds.run(prompts, max_new_tokens, batch_size):
        parts.append(part)
        progress(len(part.outputs))
    return Rounds(
        np.concatenate([part.confidence_logits for part in parts]),
        np.concatenate([part.accept_len for part in parts]),
        np.concatenate([part.emitted for part in parts]),
        np.concatenate([part.request for part in parts]),
        {index: tokens for part in parts for index, tokens in part.outputs.items()},
    )


def measure(rounds: Rounds, scaling: Scaling | None) -> dict[str, Any]:
    """All figures of a set of rounds.

    Args:
        rounds: verified in full.
        scaling: as fitted, or None for an uncalibrated drafter.

    Returns:
        accept_len: mean tokens a round gave (bonus included). conditional_acceptance: P(draft k accepted |
        the first k-1 were), [γ]. waste: share of drafted tokens that were rejected. ece_before, ece_after,
        auc: of the survival a_k, [γ]. thresholds: for each threshold on a_k, tokens and verified drafts a
        round.
    """
    outcome = accepted_prefixes(rounds)
    reached = np.concatenate([np.ones((len(outcome), 1)), outcome[:, :-1]], axis=1).sum(0)
    before, after = survivals(rounds.confidence_logits), survivals(rounds.confidence_logits, scaling)
    depth = range(outcome.shape[1])
    return {
        "rounds": len(outcome),
        "tokens": int(rounds.emitted.sum()),
        "accept_len": _round(rounds.emitted.mean()),
        "conditional_acceptance": _round(outcome.sum(0) / np.maximum(reached, 1)),
        "waste": _round(1 - rounds.accept_len.sum() / outcome.size),
        "ece_before": _round([expected_calibration_error(before[:, k], outcome[:, k]) for k in depth]),
        "ece_after": _round([expected_calibration_error(after[:, k], outcome[:, k]) for k in depth]),
        "auc": _round([area_under_roc(after[:, k], outcome[:, k]) for k in depth]),
        "thresholds": [_at_threshold(after, rounds.accept_len, tau) for tau in THRESHOLDS],
    }


def accepted_prefixes(rounds: Rounds) -> Array:
    """y_k = 1[the first k drafts were all accepted], [R, γ] float64."""
    depth = np.arange(rounds.confidence_logits.shape[1])
    return (rounds.accept_len[:, None] > depth).astype(np.float64)


def plot_measures(rounds: Rounds, scaling: Scaling | None, title: str, folder: Path) -> None:
    """Write acceptance.png, reliability.png and thresholds.png (the paper's figures 2, 5 and 6)."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figures = measure(rounds, scaling)
    positions = np.arange(1, rounds.confidence_logits.shape[1] + 1)

    figure, axes = plt.subplots(figsize=(4.5, 3.2))
    axes.plot(positions, figures["conditional_acceptance"], marker="o")
    axes.set(xlabel="draft position", ylabel="acceptance given its prefix", ylim=(0, 1), title=title)
    axes.set_xticks(positions)
    _finish(figure, folder / "acceptance.png")

    figure, panels = plt.subplots(1, 2, figsize=(8, 3.8), sharey=True)
    outcome = accepted_prefixes(rounds)
    for panel, name, used_scaling in zip(
        panels, ("uncalibrated", "calibrated"), (None, scaling), strict=True
    ):
        predicted = survivals(rounds.confidence_logits, used_scaling)
        for k in range(outcome.shape[1]):
            bins = reliability_bins(predicted[:, k], outcome[:, k])
            used = np.array(bins.counts) > 0
            panel.plot(
                np.array(bins.mean_predicted)[used],
                np.array(bins.mean_observed)[used],
                ".-",
                label=f"k={k + 1}",
            )
        panel.plot([0, 1], [0, 1], "k--", linewidth=0.8)
        panel.set(xlabel="predicted survival", title=f"{title}, {name}")
    panels[0].set_ylabel("observed")
    panels[0].legend()
    _finish(figure, folder / "reliability.png")

    figure, axes = plt.subplots(figsize=(4.5, 3.2))
    sweep = figures["thresholds"]
    axes.plot([x["tau"] for x in sweep], [x["accept_len"] for x in sweep], label="accept length")
    axes.plot([x["tau"] for x in sweep], [x["verified"] for x in sweep], label="verified drafts")
    axes.plot([x["tau"] for x in sweep], [x["acceptance"] for x in sweep], label="share accepted")
    axes.set(xlabel="threshold on survival", title=title)
    axes.legend()
    _finish(figure, folder / "thresholds.png")


def calibration_of(drafter: Path, temperature: float, draft_len: int) -> Scaling | None:
    """What is stored beside a checkpoint for this kind of round, or None."""
    table = CalibrationTable.load(drafter)
    return None if table is None else table.scaling_for("coupled", temperature, draft_len)


def _at_threshold(survival: Array, accept_len: Array, tau: float) -> dict[str, float]:
    """What a static threshold on a_k would have verified and gained in the same rounds."""
    verify_len = (survival >= tau).cumprod(axis=1).sum(axis=1)
    kept = np.minimum(accept_len, verify_len)
    return {
        "tau": tau,
        "verified": _round(verify_len.mean()),
        "accept_len": _round(1 + kept.mean()),
        "acceptance": _round(kept.sum() / max(1, verify_len.sum())),
    }


def _round(value: Any) -> Any:
    rounded = np.round(np.asarray(value, dtype=np.float64), 4)
    return np.where(np.isnan(rounded), None, rounded).tolist()  # JSON knows no nan


def _finish(figure: Any, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
