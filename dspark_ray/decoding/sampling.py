"""From logits to the distribution that is sampled, for target and drafter alike (spec sections 1 and 3).

Every probability in this package comes from `probabilities`, so the q that a draft was drawn from and the q
it is scored with cannot differ. Symbols: V vocabulary · V' draft vocabulary · "..." any leading shape.
"""

import torch
from torch import Tensor

# Below this temperature sampling is argmax, with a one-hot distribution.
GREEDY_TEMPERATURE = 1e-5


def probabilities(
    logits: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
) -> Tensor:
    """The distribution that a token is drawn from: temperature, min-p, top-k, then top-p.

    Args:
        logits: [..., V], any bias and penalty already added.
        temperature: number, or [...] one per row; below 1e-5 the result is one-hot at the argmax.
        top_k: keep the k most probable tokens (and what ties with the last of them); 0 keeps all.
        top_p: keep the most probable tokens until their mass reaches this; 1 keeps all.
        min_p: keep tokens with at least this share of the largest probability; 0 keeps all.

    Returns:
        [..., V] fp32, rows sum to 1.
    """
    logits = logits.float()
    temperature = _per_row(temperature, logits)
    greedy = temperature < GREEDY_TEMPERATURE
    one_hot = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    if bool(greedy.all()):
        return one_hot
    scaled = logits / torch.where(greedy, 1.0, temperature)
    scaled = _keep_min_p(scaled, _per_row(min_p, logits))
    scaled = _keep_top_k_top_p(scaled, _per_row(top_k, logits), _per_row(top_p, logits))
    return torch.where(greedy, one_hot, scaled.softmax(-1))


def exponential_noise(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Independent Exp(1) noise of the shape of `like` (fp32), the randomness of one `draw`."""
    return torch.empty_like(like, dtype=torch.float32).exponential_(generator=generator)


def draw(probs: Tensor, noise: Tensor) -> Tensor:
    """Draw from `probs` by an exponential race: argmax(probs / noise) has exactly that distribution.

    Args:
        probs: [..., V].
        noise: [..., V] from `exponential_noise`. The same noise and probabilities give the same token.

    Returns:
        [...] int64.
    """
    return (probs / noise).argmax(-1)


def to_target_vocabulary(draft_probs: Tensor, draft_to_target: Tensor, vocab_size: int) -> Tensor:
    """Spread q over the target's vocabulary; tokens outside the draft vocabulary get probability 0.

    Args:
        draft_probs: [..., V'].
        draft_to_target: [V'] int64, target id of each draft id.
        vocab_size: V.

    Returns:
        [..., V].
    """
    spread = draft_probs.new_zeros(*draft_probs.shape[:-1], vocab_size)
    spread[..., draft_to_target] = draft_probs
    return spread


def _per_row(value: float | Tensor, logits: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float32, device=logits.device).unsqueeze(-1)


def _keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    if not bool((min_p > 0).any()):
        return logits
    # In logits, so that a share of the largest probability is a distance to the largest logit.
    threshold = logits.amax(-1, keepdim=True) + min_p.log()
    return logits.masked_fill(logits < threshold, float("-inf"))


def _keep_top_k_top_p(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    limits_k, limits_p = bool((top_k > 0).any()), bool((top_p < 1).any())
    if not (limits_k or limits_p):
        return logits
    descending = logits.sort(-1, descending=True).values
    if limits_k:
        width = logits.shape[-1]
        last = torch.where(top_k > 0, top_k.clamp(max=width), width).long() - 1
        threshold = descending.gather(-1, last.expand(*logits.shape[:-1], 1))
        logits = logits.masked_fill(logits < threshold, float("-inf"))
        descending = descending.masked_fill(descending < threshold, float("-inf"))
    if limits_p:
        sorted_probs = descending.softmax(-1)
        # A token stays while the mass before it is below top_p, so the most probable one always stays.
        kept = (sorted_probs.cumsum(-1) - sorted_probs < top_p).sum(-1, keepdim=True).clamp(min=1)
        threshold = descending.gather(-1, kept - 1)
        # top_p = 1 keeps all, whatever rounding does to the cumulative sum.
        logits = logits.masked_fill((logits < threshold) & (top_p < 1), float("-inf"))
    return logits
