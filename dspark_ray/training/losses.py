"""The three-term loss with its gradient in closed form (dspark-spec section 2).

Symbols: S slots that count · P teacher rows (one a sequence position) · V' draft vocabulary · q draft, p
target distribution. p is the target's softmax over its whole vocabulary, so within a reduced draft vocabulary
its rows sum to less than 1: what is outside counts as missed.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

_ROWS_AT_ONCE = 32  # 32 rows of 8,192 fp32 are 1 MB: every pass stays in the processor's cache


class SlotTerms(NamedTuple):
    """What one pass over the logits yields.

    Attributes:
        loss: scalar, Σ scale·(ce·CE + kl·KL + tv·‖q-p‖₁), differentiable in the logits.
        sums: [3] Σ scale·CE, Σ scale·KL, Σ scale·‖q-p‖₁, for metrics.
        overlap: c* = 1 - ½‖q-p‖₁ of each slot, [S].
        best: argmax of each slot's logits, [S] draft-vocabulary indices.
    """

    loss: Tensor
    sums: Tensor
    overlap: Tensor
    best: Tensor


def position_weights(block_size: int, decay: float) -> Tensor:
    """w_k = exp(-(k-1)/decay) for k = 1..γ, [γ]; w_1 = 1."""
    return torch.exp(-torch.arange(block_size, dtype=torch.float32) / decay)


def expected_accept_len(accept_rates: Tensor) -> Tensor:
    """1 + Σ_k Π_{i≤k} c*_i of each block: [..., γ] → [...]; [.5, .5] gives 1.75."""
    return 1 + accept_rates.cumprod(dim=-1).sum(dim=-1)


def slot_terms(
    logits: Tensor,
    teacher_log_probs: Tensor,
    teacher_rows: Tensor,
    data_ids: Tensor,
    scale: Tensor,
    weights: tuple[float, float, float],
) -> SlotTerms:
    """CE, KL and TV of every slot and their gradient in one pass.

    Args:
        logits: L_k [S, V'], bias included.
        teacher_log_probs: log p [P, V'], normalised over the target's whole vocabulary.
        teacher_rows: [S] int64, which row is slot's teacher.
        data_ids: [S] int64, data token in the draft vocabulary; -1 outside it (its CE is left out).
        scale: [S] fp32, position weight over the step's global denominator.
        weights: of ce, kl, tv.
    """
    return SlotTerms(*_SlotLoss.apply(logits, teacher_log_probs, teacher_rows, data_ids, scale, weights))


class _SlotLoss(torch.autograd.Function):
    """d/dz of softmax losses: CE: q - onehot; KL: q·Σp - p; ‖q-p‖₁: q·(g - Σ g·q) with g = sign(q-p)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        teacher_log_probs: Tensor,
        teacher_rows: Tensor,
        data_ids: Tensor,
        scale: Tensor,
        weights: tuple[float, float, float],
    ) -> tuple[Tensor, ...]:
        count = logits.shape[0]
        gradient = torch.empty_like(logits)
        teacher = teacher_log_probs.exp()
        negative_entropy = (teacher * teacher_log_probs).sum(-1)
        mass = teacher.sum(-1)
        per_slot = torch.empty(count, 3, device=logits.device)
        best = torch.empty(count, dtype=torch.int64, device=logits.device)
        step = _ROWS_AT_ONCE if logits.device.type == "cpu" else max(count, 1)
        for start in range(0, count, step):
            rows = slice(start, start + step)
            which, ids = teacher_rows[rows], data_ids[rows]
            gradient[rows], per_slot[rows], best[rows] = _rows(
                logits[rows].float(),
                teacher[which],
                negative_entropy[which],
                mass[which],
                ids,
                scale[rows],
                weights,
            )
        ctx.save_for_backward(gradient)
        sums = (per_slot * scale[:, None]).sum(0)
        loss = (sums * torch.tensor(weights, device=logits.device)).sum()
        overlap = 1 - per_slot[:, 2] / 2
        ctx.mark_non_differentiable(sums, overlap, best)
        return loss, sums, overlap, best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None, None


def _rows(
    z: Tensor,
    p: Tensor,
    negative_entropy: Tensor,
    mass: Tensor,
    ids: Tensor,
    scale: Tensor,
    weights: tuple[float, float, float],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient [R, V'], (CE, KL, TV) [R, 3] and argmax [R] of some rows; z is overwritten."""
    ce_weight, kl_weight, tv_weight = weights
    best = z.argmax(-1)
    inside = (ids >= 0).float()
    at = ids.clamp(min=0)[:, None]
    z -= z.logsumexp(-1, keepdim=True)
    ce = -z.gather(1, at).squeeze(1) * inside
    kl = negative_entropy - (p * z).sum(-1)
    q = z.exp_()
    sign = q - p
    tv = sign.abs().sum(-1) + (1 - mass).clamp(min=0)
    sign.sign_()
    inner = (sign * q).sum(-1)
    gradient = sign.sub_(inner[:, None]).mul_(tv_weight)
    gradient += (ce_weight * inside + kl_weight * mass)[:, None]
    gradient *= q
    gradient.sub_(p, alpha=kl_weight)
    gradient.scatter_add_(1, at, (-ce_weight * inside)[:, None])
    gradient *= scale[:, None]
    return gradient, torch.stack([ce, kl, tv], dim=1), best
