"""Tiny drafters with random weights, and what they must draft, computed from scratch by the model alone."""

import torch
from torch import Tensor

from dspark_ray.drafter.model import DraftConfig, DSparkModel, argmax_choice
from dspark_ray.drafter.runner import DraftRunner

WIDTH, VOCAB, BLOCK = 32, 50, 5
torch.set_num_threads(1)  # threads only wait for each other on tensors this small

VARIANTS: dict[str, dict] = {
    "vanilla, linear": {},
    "reduced vocabulary": {"draft_vocab_size": 20},
    "gated, mlp": {"markov_head_type": "gated", "confidence_head_type": "mlp"},
    "rnn": {"markov_head_type": "rnn", "confidence_head_with_markov": False},
    "no markov (DFlash layout)": {"markov_rank": 0, "sample_from_anchor": False, "block_size": BLOCK + 1},
    "own window": {"sliding_window": 7},
}


def tiny_model(seed: int = 0, **changes: object) -> DSparkModel:
    config = DraftConfig(
        **{
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "vocab_size": VOCAB,
            "draft_vocab_size": VOCAB,
            "block_size": BLOCK,
            "mask_token_id": 1,
            "target_layer_ids": (0, 2),
            "num_target_layers": 6,
            "target_hidden_size": WIDTH,
            "markov_rank": 6,
            "enable_confidence_head": True,
            **changes,
        }
    )
    torch.manual_seed(seed)
    model = DSparkModel(config)
    for parameter in model.parameters():  # large enough that every input matters to the argmax
        parameter.data = torch.randn(parameter.shape) * 0.3 + (1.0 if parameter.ndim == 1 else 0.0)
    ids = torch.randperm(VOCAB)[: config.draft_vocab_size].sort().values
    model.attach_target(
        torch.randn(VOCAB, WIDTH), torch.randn(VOCAB, WIDTH), ids if config.reduced_vocabulary else None
    )
    return model.eval()


def tiny_runner(
    model: DSparkModel, *, window: int = 8, slots: int = 8, max_batch: int | None = None
) -> DraftRunner:
    config = model.config
    row_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    return DraftRunner(
        model,
        cache_bytes=slots * row_bytes * (min(window, config.sliding_window or window) + config.block_size),
        window=window,
        max_batch=slots if max_batch is None else max_batch,
        device="cpu",
        dtype=torch.float32,
    )


def from_scratch(
    model: DSparkModel, features: Tensor, first: int, anchor: int, draft_len: int, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts [γ'], confidence logits [γ'] and h [γ', d] of a request with features from position `first`.

    Args:
        features: [n, d] of positions first..first+n-1; the anchor follows.
    """
    position = first + len(features)
    start = max(first, position - min(window, model.config.sliding_window or window))
    at = torch.arange(start, position)
    with torch.inference_mode():
        k, v = model.context_kv(features[start - first :], at)
        anchors, positions = torch.tensor([[anchor]]), torch.tensor([[position]])
        mask = model.context_mask_for(positions, at[None])
        h = model.block(anchors, positions, draft_len, k[:, None], v[:, None], mask)[0, 0]
        drafted, confidence = model.rollout(h[None], torch.tensor([anchor]), argmax_choice)
    return drafted[0], confidence[0], h
