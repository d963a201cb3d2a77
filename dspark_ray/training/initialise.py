"""A new drafter whose layers start as copies of the target's last ones."""

from typing import Any

import torch
from torch import Tensor, nn

from dspark_ray.drafter.model import DraftConfig, DSparkModel
from dspark_ray.errors import ConfigError
from dspark_ray.training.config import DraftShape
from dspark_ray.training.frozen_target import FrozenTarget


def draft_config(shape: DraftShape, target: Any) -> DraftConfig:
    """The drafter's configuration from the run's file and the target's text configuration.

    Raises:
        ConfigError: a shape that does not fit the target; the message names the field.
    """
    rope = dict(getattr(target, "rope_parameters", None) or {})
    heads = target.num_attention_heads
    try:
        return DraftConfig(
            hidden_size=target.hidden_size,
            num_hidden_layers=shape.num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=target.num_key_value_heads,
            head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
            intermediate_size=target.intermediate_size,
            rms_norm_eps=target.rms_norm_eps,
            rope_theta=rope.get("rope_theta", 10000.0),
            max_position_embeddings=target.max_position_embeddings,
            vocab_size=target.vocab_size,
            draft_vocab_size=shape.draft_vocab_size or target.vocab_size,
            block_size=shape.block_size,
            mask_token_id=shape.mask_token_id,
            target_layer_ids=shape.target_layer_ids,
            num_target_layers=target.num_hidden_layers,
            target_hidden_size=target.hidden_size,
            markov_rank=shape.markov_rank,
            markov_head_type=shape.markov_head_type,
            enable_confidence_head=shape.enable_confidence_head,
            confidence_head_type=shape.confidence_head_type,
            sliding_window=shape.sliding_window,
        )
    except ValueError as error:
        raise ConfigError(f"draft: {error}") from error


@torch.no_grad()
def initialise_from_target(model: DSparkModel, target: FrozenTarget, sample: Tensor) -> None:
    """Copy the target's last layers and final norm; let features start as the normed last tap.

    The fc starts as the identity on the last tap, followed by the first copied layer's own input norm, so
    that the copied key and value projections see what they were trained on. A target without query and key
    norms (Llama) gets norm weights that keep the root mean square its queries and keys have on `sample`. The
    Markov bias starts at 0 (W2 = 0).

    Args:
        model: fp32, on its device.
        target: its target.
        sample: [1, T] int64 token ids to measure on.
    """
    config = model.config
    first = target.config.num_hidden_layers - config.num_hidden_layers
    sources = target.model.model.layers[first:]
    scales = _query_key_scales(target, sources, sample)
    for layer, source, (query_scale, key_scale) in zip(model.layers, sources, scales, strict=True):
        weights = {name: value.float() for name, value in source.state_dict().items()}
        weights.setdefault("self_attn.q_norm.weight", torch.full((config.head_dim,), query_scale))
        weights.setdefault("self_attn.k_norm.weight", torch.full((config.head_dim,), key_scale))
        layer.load_state_dict(weights)
    model.norm.weight.copy_(target.model.model.norm.weight)
    projection = model.projection
    projection.fc.weight.normal_(std=0.002)
    projection.fc.weight[:, -config.hidden_size :] += torch.eye(config.hidden_size)
    projection.hidden_norm.weight.copy_(sources[0].input_layernorm.weight)
    if model.markov_head is not None:
        model.markov_head.markov_w1.weight.normal_(std=0.5)
        model.markov_head.markov_w2.weight.zero_()
    if model.confidence_head is not None and isinstance(model.confidence_head.proj, nn.Linear):
        model.confidence_head.proj.weight.zero_()
        model.confidence_head.proj.bias.zero_()


def _query_key_scales(target: FrozenTarget, layers: Any, sample: Tensor) -> list[tuple[float, float]]:
    """Root mean square of every layer's queries and keys on a sample."""
    seen: list[Tensor] = []
    watched = [p for layer in layers for p in (layer.self_attn.q_proj, layer.self_attn.k_proj)]
    hooks = [p.register_forward_hook(lambda _m, _i, out: seen.append(out.float())) for p in watched]
    target.model.model(input_ids=sample.to(target.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    scales = [float(out.pow(2).mean().sqrt()) for out in seen]
    return list(zip(scales[0::2], scales[1::2], strict=True))
