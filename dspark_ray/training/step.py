"""Forward and loss of one batch of anchors; everything that has a gradient passes here.

Shapes: B sequences · N anchors in each · γ slots · S valid slots · P teacher rows · V' draft vocabulary.
"""

import torch
from torch import Tensor, nn

from dspark_ray.drafter.model import DSparkModel
from dspark_ray.training.config import LossConfig, LossWeights
from dspark_ray.training.data import AnchorBatch
from dspark_ray.training.frozen_target import Captured
from dspark_ray.training.losses import expected_accept_len, position_weights, slot_terms

Sums = dict[str, Tensor]


def slot_weight_sum(batch: AnchorBatch, position_decay: float) -> float:
    """Σ of the position weights of all valid slots: the batch's part of the step's global denominator."""
    weights = position_weights(batch.valid.shape[-1], position_decay)
    return float((batch.valid * weights).sum())


def target_to_draft(model: DSparkModel) -> Tensor:
    """[V] int64: draft-vocabulary index of each target id, -1 outside."""
    table = torch.full((model.config.vocab_size,), -1, device=model.draft_to_target.device)
    table[model.draft_to_target] = torch.arange(model.config.draft_vocab_size, device=table.device)
    return table


def batch_loss(
    model: DSparkModel,
    batch: AnchorBatch,
    captured: Captured,
    loss: LossConfig,
    weights: LossWeights,
    denominator: float,
    to_draft: Tensor,
) -> tuple[Tensor, Sums]:
    """The batch's share of a step's loss.

    Args:
        model: the drafter, target attached.
        batch: sequences and anchors.
        captured: the target's features of those sequences.
        loss: what does not change over the run.
        weights: of the terms at this step.
        denominator: Σ of position weights over the whole step, all batches and ranks.
        to_draft: `target_to_draft(model)`.

    Returns:
        A scalar to call backward on (0, without gradient, when nothing is valid), and sums for metrics.
    """
    device = model.norm.weight.device
    valid = batch.valid.to(device)
    if not valid.any():
        return torch.zeros((), device=device, requires_grad=True), {}
    anchors, tokens = batch.anchors.to(device), batch.token_ids.to(device)
    h = _run_blocks(model, captured, anchors, tokens[..., 0])
    h_valid = h[valid]
    logits = model.base_logits(h_valid)
    previous = None
    if model.markov_head is not None:
        rows = model.markov_head.embed(tokens[..., :-1])
        logits = logits + model.markov_head.bias(model.markov_head.mix_all(rows, h)[valid])
        previous = rows[valid]

    slots = torch.arange(valid.shape[-1], device=device)
    width = captured.hidden.shape[1]
    sequence = torch.arange(len(anchors), device=device)[:, None, None]
    teacher_at = (sequence * width + anchors[..., None] + slots)[valid]  # slot k: position a+k-1
    unique, teacher_rows = teacher_at.unique(return_inverse=True)
    with torch.no_grad():
        teacher = model.base_logits(captured.hidden.flatten(0, 1)[unique]).float()
        teacher -= captured.log_normaliser.flatten()[unique, None]
    scale = (
        position_weights(valid.shape[-1], loss.position_decay).to(device).expand_as(valid)[valid]
        / denominator
    )
    terms = slot_terms(
        logits,
        teacher,
        teacher_rows,
        to_draft[tokens[..., 1:][valid]],
        scale,
        (weights.ce, weights.kl, weights.tv),
    )
    drafted = model.to_target_ids(terms.best)
    greedy = (drafted == captured.best.flatten()[teacher_at]).float()
    total, confidence = terms.loss, torch.zeros((), device=device)
    if model.confidence_head is not None:
        label = greedy if loss.confidence_label == "greedy" else terms.overlap
        z = model.confidence_logits(h_valid, previous, drafted)
        confidence = nn.functional.binary_cross_entropy_with_logits(z, label, weight=scale, reduction="sum")
        total = total + loss.confidence * confidence
    terms_sums = torch.stack([total.detach(), *terms.sums, confidence.detach()])
    return total, {"terms": terms_sums, **_acceptance(valid, terms.overlap, greedy)}


def _run_blocks(model: DSparkModel, captured: Captured, anchors: Tensor, anchor_ids: Tensor) -> Tensor:
    """H [B, N, γ, d] of every block, each seeing only context before its anchor."""
    features = model.project(captured.taps)
    positions = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
    k, v = model.context_kv(features, positions)
    mask = model.context_mask_for(anchors, positions)
    return model.block(anchor_ids, anchors, model.config.num_draft_tokens, k, v, mask)


def _acceptance(valid: Tensor, overlap: Tensor, greedy: Tensor) -> Sums:
    """Acceptance by position (Σ and counts, [γ]) and accept lengths over blocks whose slots are all valid."""
    whole = valid.all(-1)
    sums: Sums = {"count": valid.flatten(0, -2).sum(0), "blocks": whole.sum()}
    for name, values in (("overlap", overlap), ("greedy", greedy)):
        full = torch.zeros(valid.shape, device=valid.device)
        full[valid] = values
        sums[name] = full.flatten(0, -2).sum(0)
        sums[f"{name}_accept_len"] = expected_accept_len(full[whole]).sum()
    return sums


def add_sums(total: Sums, more: Sums) -> Sums:
    """Add metrics of another batch; either may be empty."""
    if not total or not more:
        return total or more
    return {name: total[name] + more[name] for name in total}


def readable(sums: Sums) -> dict[str, float | list[float]]:
    """Means for a line of metrics."""
    count, blocks = sums["count"].clamp(min=1), sums["blocks"].clamp(min=1)
    names = ("loss", "ce", "kl", "tv", "confidence_bce")
    out: dict[str, float | list[float]] = {
        name: round(float(value), 5) for name, value in zip(names, sums["terms"], strict=True)
    }
    for name in ("greedy", "overlap"):
        out[f"{name}_rate"] = [round(float(x), 4) for x in sums[name] / count]
        out[f"{name}_accept_len"] = round(float(sums[f"{name}_accept_len"] / blocks), 4)
    return out
