"""The block forward against a slow, separate statement of it, and what a block may see."""

import math
from collections.abc import Callable

import pytest
import torch
from draft_shape import SHAPE
from torch import Tensor

from dspark_ray.drafter.model import DraftConfig, DSparkModel, argmax_choice


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x: Tensor, position: int, theta: float) -> Tensor:
    """RoPE of one head vector by complex multiplication."""
    half = len(x) // 2
    angle = position * theta ** (-torch.arange(half, dtype=torch.float64) * 2 / len(x))
    turned = torch.complex(x[:half].double(), x[half:].double()) * torch.polar(
        torch.ones(half).double(), angle
    )
    return torch.cat([turned.real, turned.imag]).float()


def slow_block(model: DSparkModel, features: Tensor, anchor: int, at: int, seen: list[int]) -> Tensor:
    """h [γ, d] of one block, one query and one head at a time. features [T, d], context rows `seen`."""
    config, eps = model.config, model.config.rms_norm_eps
    slots = config.block_size
    ids = [anchor] + [config.mask_token_id] * (slots - 1)
    x = model.embed_weight[ids]
    group = config.num_attention_heads // config.num_key_value_heads
    for layer in model.layers:
        attention, normed = layer.self_attn, rms(x, layer.input_layernorm.weight, eps)
        rows = torch.cat([features[seen], normed])
        places = [*seen, *range(at, at + slots)]
        keys = (rows @ attention.k_proj.weight.T).view(len(rows), config.num_key_value_heads, -1)
        values = (rows @ attention.v_proj.weight.T).view(len(rows), config.num_key_value_heads, -1)
        queries = (normed @ attention.q_proj.weight.T).view(slots, config.num_attention_heads, -1)
        mixed = torch.zeros(slots, config.num_attention_heads, config.head_dim)
        for slot in range(slots):
            for head in range(config.num_attention_heads):
                query = turn(
                    rms(queries[slot, head], attention.q_norm.weight, eps), at + slot, config.rope_theta
                )
                scores = torch.stack(
                    [
                        query
                        @ turn(
                            rms(keys[row, head // group], attention.k_norm.weight, eps),
                            place,
                            config.rope_theta,
                        )
                        for row, place in enumerate(places)
                    ]
                )
                weights = (scores / math.sqrt(config.head_dim)).softmax(0)
                mixed[slot, head] = weights @ values[:, head // group]
        x = x + mixed.flatten(1) @ attention.o_proj.weight.T
        normed = rms(x, layer.post_attention_layernorm.weight, eps)
        gate = normed @ layer.mlp.gate_proj.weight.T
        x = x + (gate * gate.sigmoid() * (normed @ layer.mlp.up_proj.weight.T)) @ layer.mlp.down_proj.weight.T
    return rms(x, model.norm.weight, eps)


def run(model: DSparkModel, features: Tensor, anchors: list[int], ids: list[int]) -> Tensor:
    """h [N, γ, d] of blocks that share features [T, d]."""
    positions = torch.arange(len(features))[None]
    k, v = model.context_kv(features[None], positions)
    at = torch.tensor([anchors])
    mask = model.context_mask_for(at, positions)
    return model.block(torch.tensor([ids]), at, model.config.num_draft_tokens, k, v, mask)[0]


def test_block_equals_its_definition(make_model: Callable[..., DSparkModel]) -> None:
    """Faults 1 and 4: a prompt of 5 has context 0-4 and its block at 5..; other anchors change nothing."""
    model = make_model()
    features = torch.randn(12, 16)
    h = run(model, features, [5, 7, 10], [8, 9, 41])
    for row, (anchor, at) in enumerate([(8, 5), (9, 7), (41, 10)]):
        expected = slow_block(model, features, anchor, at, list(range(at)))
        torch.testing.assert_close(h[row], expected, atol=1e-5, rtol=1e-4)


def test_a_window_hides_older_context_and_an_empty_context_is_allowed(
    make_model: Callable[..., DSparkModel],
) -> None:
    model = make_model(sliding_window=3)
    features = torch.randn(9, 16)
    h = run(model, features, [0, 8], [8, 9])
    torch.testing.assert_close(h[0], slow_block(model, features, 8, 0, []), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(h[1], slow_block(model, features, 9, 8, [5, 6, 7]), atol=1e-5, rtol=1e-4)


def test_dflash_layout_predicts_from_mask_slots_only(make_model: Callable[..., DSparkModel]) -> None:
    model = make_model(sample_from_anchor=False)
    features = torch.randn(6, 16)
    h = run(model, features, [6], [8])
    assert h.shape == (1, 3, 16)
    torch.testing.assert_close(
        h[0], slow_block(model, features, 8, 6, list(range(6)))[1:], atol=1e-5, rtol=1e-4
    )


def test_features_arrive_in_pieces_like_at_once(make_model: Callable[..., DSparkModel]) -> None:
    """Fault 9: chunks of 4, 4 and 2 rows give the keys and values of one chunk of 10."""
    model = make_model()
    taps, positions = torch.randn(10, 32), torch.arange(10)
    whole = model.context_kv(model.project(taps), positions)
    parts = [
        model.context_kv(model.project(taps[span]), positions[span])
        for span in (slice(0, 4), slice(4, 8), slice(8, 10))
    ]
    for index in range(2):
        torch.testing.assert_close(torch.cat([part[index] for part in parts], dim=1), whole[index])


def test_more_slots_than_trained_are_refused_and_fewer_are_run(
    make_model: Callable[..., DSparkModel],
) -> None:
    model = make_model()
    k, v = model.context_kv(torch.randn(1, 3, 16), torch.arange(3)[None])
    mask, ids, at = torch.ones(1, 1, 3, dtype=torch.bool), torch.tensor([[8]]), torch.tensor([[3]])
    h = model.block(ids, at, 2, k, v, mask)
    tokens, z = model.rollout(h, ids, argmax_choice)
    assert tokens.shape == z.shape == (1, 1, 2)
    with pytest.raises(ValueError, match=r"num_draft_tokens 5 is not in 1\.\.4"):
        model.block(ids, at, 5, k, v, mask)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_ids": (2, 2)}, "strictly increasing"),
        ({"target_layer_ids": (0, 3)}, "the last layer"),
        ({"mask_token_id": 50}, "mask_token_id 50 is outside"),
        ({"draft_vocab_size": 51}, "draft_vocab_size 51 exceeds"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_a_contradictory_config_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftConfig(**{**SHAPE, **changes})
