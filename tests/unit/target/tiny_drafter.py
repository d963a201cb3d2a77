"""A drafter small enough for unit tests, real in every other respect."""

import torch

from dspark_ray.drafter.model import DraftConfig, DSparkModel
from dspark_ray.drafter.runner import DraftItem, DraftRunner

torch.set_num_threads(1)  # threads only wait for each other on tensors this small
WIDTH, VOCAB, BLOCK = 16, 64, 4


def tiny_model(seed: int = 0) -> DSparkModel:
    torch.manual_seed(seed)
    config = DraftConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=32, vocab_size=VOCAB, draft_vocab_size=VOCAB, block_size=BLOCK, mask_token_id=63,
        target_layer_ids=(1, 3), num_target_layers=6, target_hidden_size=WIDTH, markov_rank=4,
        enable_confidence_head=True,
    )  # fmt: skip
    model = DSparkModel(config)
    model.attach_target(torch.randn(VOCAB, WIDTH), torch.randn(VOCAB, WIDTH))
    return model.eval().requires_grad_(False)


def tiny_runner(model: DSparkModel, *, window: int, slots: int = 8, max_batch: int = 8) -> DraftRunner:
    config = model.config
    slot_bytes = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4
    return DraftRunner(
        model, cache_bytes=slots * slot_bytes * (window + BLOCK), window=window, max_batch=min(slots, max_batch),
        device="cpu", dtype=torch.float32,
    )  # fmt: skip


def drafts_of_a_fresh_drafter(
    model: DSparkModel, features: torch.Tensor, anchor: int, *, window: int, low: int
) -> list[int]:
    """What a drafter says that has just been given positions low..n-1 of features [n, d]."""
    item = DraftItem("x", low, features[low:], anchor, BLOCK, fresh=True)
    return tiny_runner(model, window=window).draft([item]).draft_token_ids[0].tolist()
