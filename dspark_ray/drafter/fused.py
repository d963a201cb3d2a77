"""The draft layers for serving: one matrix for what reads the same input, keys and values in place.

Computes what `DSparkModel.context_kv` and `DSparkModel.block` compute, for one block per request.

Symbols: B requests · N context rows · S block slots · d hidden size · H query heads · G key/value heads ·
D head size · L draft layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark_ray.drafter.context_cache import BlockRows, ContextCache
from dspark_ray.drafter.model import DSparkModel


@dataclass(frozen=True)
class _LayerWeights:
    input_norm: Tensor  # [d]
    qkv: Tensor  # [(H + 2G)·D, d]
    qk_norm: Tensor  # [H + G, D], with the attention scale in the query rows
    out: Tensor  # [d, H·D]
    mlp_norm: Tensor  # [d]
    gate_up: Tensor  # [2·intermediate, d]
    down: Tensor  # [d, intermediate]


class FusedLayers:
    """Draft layers with fused weights, over a `ContextCache`.

    Args:
        model: the drafter; its weights are copied, in its dtype and on its device.
    """

    def __init__(self, model: DSparkModel):
        self._model = model
        self._config = config = model.config
        self._eps = config.rms_norm_eps
        self._layers = [_fuse(layer, config.head_dim) for layer in model.layers]
        attentions = [layer.self_attn for layer in model.layers]
        # Context features enter all layers alike, so one matrix makes the keys and values of all of them.
        self._context_kv = torch.cat(
            [weight for a in attentions for weight in (a.k_proj.weight, a.v_proj.weight)]
        ).detach()  # [L·2·G·D, d]
        self._context_k_norm = torch.stack([a.k_norm.weight for a in attentions]).detach()[
            :, None
        ]  # [L, 1, D]

    def context_kv(self, features: Tensor, positions: Tensor) -> Tensor:
        """Context keys and values.

        Args:
            features: [N, d].
            positions: [N] int64.

        Returns:
            [L, N, 2G, D]: rotated keys, then values.
        """
        config = self._config
        kv_heads, head_dim = config.num_key_value_heads, config.head_dim
        both = functional.linear(features, self._context_kv)
        both = both.view(len(features), config.num_hidden_layers, 2, kv_heads, head_dim)
        cos, sin = (t.to(both.dtype)[:, None, None] for t in self._model.rotary(positions))
        keys = functional.rms_norm(both[:, :, 0], (head_dim,), None, self._eps) * self._context_k_norm
        return torch.cat([_rotate(keys, cos, sin), both[:, :, 1]], dim=2).transpose(0, 1)

    def block(self, anchor_ids: Tensor, positions: Tensor, batch: BlockRows, cache: ContextCache) -> Tensor:
        """Run one block per request against its slot.

        Args:
            anchor_ids: [B] int64.
            positions: [B] int64, s of each request.
            batch: cache rows, in the order of anchor_ids.
            cache: holds the context and takes the blocks' own keys and values for the time of this call.

        Returns:
            [B, S, d] after the final norm.
        """
        config, model = self._config, self._model
        slots = batch.block_rows.shape[1]
        ids = torch.full((len(anchor_ids), slots), config.mask_token_id, device=anchor_ids.device)
        ids[:, 0] = anchor_ids
        at = positions[:, None] + torch.arange(slots, device=anchor_ids.device)
        x = functional.embedding(ids, model.embed_weight)
        cos, sin = (t.to(x.dtype)[:, :, None] for t in model.rotary(at))
        for index, layer in enumerate(self._layers):
            normed = functional.rms_norm(x, x.shape[-1:], layer.input_norm, self._eps)
            x = x + self._attend(index, layer, normed, (cos, sin), batch, cache)
            normed = functional.rms_norm(x, x.shape[-1:], layer.mlp_norm, self._eps)
            gate, up = functional.linear(normed, layer.gate_up).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, layer.down)
        return model.norm(x)

    def _attend(
        self,
        index: int,
        layer: _LayerWeights,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        batch: BlockRows,
        cache: ContextCache,
    ) -> Tensor:
        config = self._config
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        b, s, _ = x.shape
        qkv = functional.linear(x, layer.qkv).view(b, s, heads + 2 * kv_heads, head_dim)
        qk, v = qkv.split([heads + kv_heads, kv_heads], dim=2)
        qk = _rotate(functional.rms_norm(qk, (head_dim,), None, self._eps) * layer.qk_norm, *rotary)
        q, k = qk.split([heads, kv_heads], dim=2)
        cache.write_block(index, batch, torch.cat([k, v], dim=2))
        keys, values = cache.read(index, batch)
        # Query heads of one key/value head become rows of it: no copy of keys per query head.
        q = q.reshape(b, s, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4).reshape(b, kv_heads, -1, head_dim)
        out = functional.scaled_dot_product_attention(q, keys, values, attn_mask=batch.mask, scale=1.0)
        out = out.view(b, kv_heads, -1, s, head_dim).permute(0, 3, 1, 2, 4).reshape(b, s, heads * head_dim)
        return functional.linear(out, layer.out)


def _fuse(layer: nn.Module, head_dim: int) -> _LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    q_norm = attention.q_norm.weight.expand(attention.heads, -1) * head_dim**-0.5
    k_norm = attention.k_norm.weight.expand(attention.kv_heads, -1)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return _LayerWeights(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=torch.cat([p.weight for p in projections]).detach(),
        qk_norm=torch.cat([q_norm, k_norm]).detach(),
        out=attention.o_proj.weight.detach(),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach(),
        down=mlp.down_proj.weight.detach(),
    )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
