"""The DSpark draft model: feature projection, draft layers, heads (dspark-spec section 1).

Shapes: B contexts (requests, or training sequences) · N blocks that share one context (1 when serving, many
anchors when training) · γ draft positions · T or W context positions · L draft layers · m tap layers ·
d hidden size · H query heads · G key/value heads · D head size · V target vocabulary · V' draft vocabulary.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from dspark_ray.drafter.heads import ConfidenceHead, ConfidenceKind, MarkovHead, MarkovKind


class DraftConfig(BaseModel):
    """Shape and conventions of one drafter; layer ids are DeepSpec's (0-based decoder layers)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int = Field(gt=0, description="d, equal to the target's: embedding and lm_head are shared")
    num_hidden_layers: int = Field(gt=0, description="L, draft layers")
    num_attention_heads: int = Field(gt=0, description="H")
    num_key_value_heads: int = Field(gt=0, description="G, divides H")
    head_dim: int = Field(gt=0, description="D, even")
    intermediate_size: int = Field(gt=0, description="width of the SwiGLU MLP")
    rms_norm_eps: float = Field(default=1e-6, gt=0, description="epsilon of every norm")
    rope_theta: float = Field(default=10000.0, gt=0, description="RoPE base")
    rope_type: Literal["default", "linear"] = Field(default="default", description="RoPE scaling rule")
    rope_factor: float = Field(default=1.0, gt=0, description="positions are divided by it (linear)")
    max_position_embeddings: int = Field(default=8192, gt=0, description="the target's context, tokens")
    vocab_size: int = Field(gt=0, description="V, the target's vocabulary")
    draft_vocab_size: int = Field(gt=0, description="V', equal to V unless reduced")
    block_size: int = Field(gt=0, description="block slots; all predict iff sample_from_anchor")
    mask_token_id: int = Field(ge=0, description="embedding row of the slots after the anchor; not text")
    target_layer_ids: tuple[int, ...] = Field(min_length=1, description="tap layers; -1 is the embedding")
    num_target_layers: int = Field(gt=0, description="decoder layers of the target")
    target_hidden_size: int = Field(gt=0, description="width of one tap")
    markov_rank: int = Field(default=0, ge=0, description="r; 0 disables the head (DFlash)")
    markov_head_type: MarkovKind = Field(default="vanilla", description="form of the Markov head")
    markov_temp_scale: bool = Field(default=False, description="the vanilla bias has a learnable scale")
    enable_confidence_head: bool = Field(default=False, description="whether confidences are predicted")
    confidence_head_type: ConfidenceKind = Field(default="linear", description="linear is blind to x_k")
    confidence_head_with_markov: bool = Field(default=True, description="the linear head reads W1[x_{k-1}]")
    sample_from_anchor: bool = Field(default=True, description="the anchor's slot predicts position s+1")
    sliding_window: int | None = Field(default=None, gt=0, description="context rows seen; None means all")

    @property
    def num_draft_tokens(self) -> int:
        """γ, the most tokens a block drafts."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def reduced_vocabulary(self) -> bool:
        """Whether V' < V, so that draft ids need translation."""
        return self.draft_vocab_size != self.vocab_size

    @property
    def confidence_rank(self) -> int:
        """Markov columns that the linear confidence head reads."""
        return self.markov_rank if self.confidence_head_with_markov else 0

    @model_validator(mode="after")
    def _consistent(self) -> "DraftConfig":
        ids = self.target_layer_ids
        if list(ids) != sorted(set(ids)):
            raise ValueError(f"target_layer_ids {list(ids)} must be strictly increasing")
        if ids[0] < -1 or ids[-1] >= self.num_target_layers - 1:
            raise ValueError(
                f"target_layer_ids {list(ids)} must lie in -1..{self.num_target_layers - 2}: the last layer "
                f"({self.num_target_layers - 1}) has no raw residual output. Are they speculators ids (+1)?"
            )
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is outside the vocabulary {self.vocab_size}"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_key_value_heads must divide num_attention_heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even for RoPE")
        if self.num_draft_tokens < 1:
            raise ValueError("block_size must be at least 2 when sample_from_anchor is false")
        return self


class Norm(nn.RMSNorm):
    """RMSNorm in the dtype of its weight: fp32 under autocast, where the fused kernel wants both alike."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] → [..., d]."""
        return super().forward(x.to(self.weight.dtype))


class FeatureProjection(nn.Module):
    """C = RMSNorm(W_fc · concat of the taps). It runs in the target's process, so it can be loaded alone."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        width = len(config.target_layer_ids) * config.target_hidden_size
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        self.hidden_norm = Norm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, taps: Tensor) -> Tensor:
        """Taps [..., m·d_target], layers in the order of target_layer_ids → context features [..., d]."""
        return self.hidden_norm(self.fc(taps.to(self.fc.weight.dtype)))


class DraftAttention(nn.Module):
    """Attention of a block to its context and, in both directions, to itself."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        d = config.hidden_size
        self.q_proj = nn.Linear(d, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(d, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(d, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, d, bias=False)
        self.q_norm = Norm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Norm(self.head_dim, eps=config.rms_norm_eps)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [..., G, D] of x [..., d] with cos and sin [..., D]."""
        split = (*x.shape[:-1], self.kv_heads, self.head_dim)
        k = rotate(self.k_norm(self.k_proj(x).view(split)), cos, sin)
        return k, self.v_proj(x).view(split)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, context: tuple[Tensor, Tensor], context_mask: Tensor
    ) -> Tensor:
        """One layer's attention.

        Args:
            x: normed block input [B, N, S, d] of S slots.
            cos: [B, N, S, D], and sin likewise.
            sin: see cos.
            context: this layer's context keys and values, each [B, W, G, D].
            context_mask: [B, N, W] bool, true where a block may look.

        Returns:
            [B, N, S, d].
        """
        b, n, s, _ = x.shape
        g, group = self.kv_heads, self.heads // self.kv_heads
        q = rotate(self.q_norm(self.q_proj(x).view(b, n, s, self.heads, self.head_dim)), cos, sin)
        k, v = self.keys_values(x, cos, sin)
        q = (q * self.head_dim**-0.5).view(b, n, s, g, group, self.head_dim).permute(0, 3, 1, 4, 2, 5)
        q_all = q.reshape(b, g, n * group * s, self.head_dim)
        q_own = q.reshape(b, g, n, group * s, self.head_dim)
        context_k, context_v = (t.to(q.dtype).transpose(1, 2) for t in context)  # [B, G, W, D]
        own_k, own_v = (t.permute(0, 3, 1, 2, 4) for t in (k, v))  # [B, G, N, S, D]
        width = context_k.shape[2]
        far = (q_all @ context_k.transpose(2, 3)).view(b, g, n, group * s, width)
        far = far.masked_fill(~context_mask[:, None, :, None, :], -math.inf)
        near = q_own @ own_k.transpose(3, 4)  # [B, G, N, group·S, S]
        weights = torch.cat([far, near], dim=-1).softmax(dim=-1, dtype=torch.float32).to(v.dtype)
        far, near = weights.split([width, s], dim=-1)
        out = (far.reshape(b, g, n * group * s, width) @ context_v).view(b, g, n, group * s, self.head_dim)
        out = out + near @ own_v
        out = out.view(b, g, n, group, s, self.head_dim).permute(0, 2, 4, 1, 3, 5)
        return self.o_proj(out.reshape(b, n, s, self.heads * self.head_dim))


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] → [..., d]."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """Pre-norm attention and MLP. Context features enter the attention without the layer's norm."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = DraftMLP(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, context: tuple[Tensor, Tensor], context_mask: Tensor
    ) -> Tensor:
        """Arguments as DraftAttention.forward, x [B, N, S, d] before the norm."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, context, context_mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class DSparkModel(nn.Module):
    """The drafter. Embedding and lm_head are the target's: attach them before use; they are not parameters.

    Call order when serving: `project` (at the target) → `context_kv` for the new rows → `block` → `rollout`.
    """

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        self.projection = FeatureProjection(config)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.markov_head: MarkovHead | None = None
        if config.markov_rank:
            self.markov_head = MarkovHead(
                config.markov_head_type,
                config.vocab_size,
                config.draft_vocab_size,
                config.markov_rank,
                config.hidden_size,
                temp_scale=config.markov_temp_scale,
            )
        self.confidence_head: ConfidenceHead | None = None
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(
                config.confidence_head_type, config.hidden_size, config.confidence_rank
            )
        d = config.head_dim
        inverse = config.rope_theta ** -(torch.arange(0, d, 2, dtype=torch.float64) / d) / config.rope_factor
        self._inverse_frequency = inverse.float()  # not a buffer: .to(bfloat16) must not round it
        self.register_buffer("embed_weight", torch.empty(0), persistent=False)  # [V, d]
        self.register_buffer("lm_head_weight", torch.empty(0), persistent=False)  # [V', d]
        self.register_buffer("draft_to_target", torch.empty(0, dtype=torch.int64), persistent=False)  # [V']

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.norm.weight.dtype

    def attach_target(self, embed: Tensor, lm_head: Tensor, draft_to_target: Tensor | None = None) -> None:
        """Take the target's frozen embedding and output rows, in this model's dtype and device.

        Args:
            embed: [V, d].
            lm_head: [V', d], or [V, d] of which the rows of `draft_to_target` are taken.
            draft_to_target: [V'] int64, target id of each draft id; needed iff V' < V.

        Raises:
            ValueError: shapes that do not fit the configuration.
        """
        config, place = self.config, self.norm.weight
        if config.reduced_vocabulary and draft_to_target is None:
            raise ValueError("a reduced draft vocabulary needs draft_to_target")
        if draft_to_target is None:
            draft_to_target = torch.arange(config.vocab_size)
        elif lm_head.shape[0] != config.draft_vocab_size:
            lm_head = lm_head[draft_to_target.to(lm_head.device)]
        for name, tensor, rows in (
            ("embed", embed, config.vocab_size),
            ("lm_head", lm_head, config.draft_vocab_size),
        ):
            if tensor.shape != (rows, config.hidden_size):
                raise ValueError(f"{name} is {list(tensor.shape)}, expected {[rows, config.hidden_size]}")
        self.embed_weight = embed.detach().to(place.device, place.dtype)
        self.lm_head_weight = lm_head.detach().to(place.device, place.dtype)
        self.draft_to_target = draft_to_target.to(place.device, torch.int64)

    def project(self, taps: Tensor) -> Tensor:
        """Taps [..., m·d_target] → context features [..., d]."""
        return self.projection(taps)

    def context_kv(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Context keys and values of every layer.

        Args:
            features: [..., d] from `project`.
            positions: [...] int64, absolute positions.

        Returns:
            Keys (rotated) and values, each [L, ..., G, D].
        """
        cos, sin = self.rotary(positions)
        features = features.to(self.dtype)
        pairs = [layer.self_attn.keys_values(features, cos, sin) for layer in self.layers]
        return torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])

    def block(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        num_draft_tokens: int,
        context_k: Tensor,
        context_v: Tensor,
        context_mask: Tensor,
    ) -> Tensor:
        """Run blocks against their contexts.

        Args:
            anchor_ids: x_0, [B, N] int64 (target vocabulary).
            anchor_positions: s, [B, N] int64.
            num_draft_tokens: γ', 1..config.num_draft_tokens.
            context_k: [L, B, W, G, D], and context_v likewise, from `context_kv`; order along W is free.
            context_v: see context_k.
            context_mask: [B, N, W] bool; must be false for positions ≥ s and outside the window
                (`context_mask_for` computes it). All false is allowed.

        Returns:
            h [B, N, γ', d]: slot k-1 predicts the token at position s+k.

        Raises:
            ValueError: γ' outside what the checkpoint was trained for.
        """
        config = self.config
        if not 1 <= num_draft_tokens <= config.num_draft_tokens:
            raise ValueError(f"num_draft_tokens {num_draft_tokens} is not in 1..{config.num_draft_tokens}")
        first = 0 if config.sample_from_anchor else 1  # DFlash layout: the anchor's slot predicts nothing
        slots = num_draft_tokens + first
        ids = torch.full((*anchor_ids.shape, slots), config.mask_token_id, device=anchor_ids.device)
        ids[..., 0] = anchor_ids
        positions = anchor_positions[..., None] + torch.arange(slots, device=anchor_ids.device)
        cos, sin = self.rotary(positions)
        x = nn.functional.embedding(ids, self.embed_weight)
        for layer, k, v in zip(self.layers, context_k, context_v, strict=True):
            x = layer(x, cos, sin, (k, v), context_mask)
        return self.norm(x[:, :, first:])

    def context_mask_for(self, anchor_positions: Tensor, context_positions: Tensor) -> Tensor:
        """Which context rows a block may see: positions in [s-window, s).

        Args:
            anchor_positions: [B, N] int64.
            context_positions: [B, W] int64, absolute position of each row; negative marks an empty row.

        Returns:
            [B, N, W] bool.
        """
        at, s = context_positions[:, None, :], anchor_positions[:, :, None]
        mask = (at >= 0) & (at < s)
        if self.config.sliding_window is not None:
            mask &= at >= s - self.config.sliding_window
        return mask

    def base_logits(self, h: Tensor) -> Tensor:
        """U_k: h [..., d] → [..., V'], before the Markov bias."""
        return nn.functional.linear(h, self.lm_head_weight)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary indices [...] → target ids [...]."""
        return self.draft_to_target[draft_ids] if self.config.reduced_vocabulary else draft_ids

    def confidence_logits(self, h: Tensor, previous: Tensor | None, drafted_ids: Tensor) -> Tensor:
        """z_k [...] fp32 from h [..., d], W1[x_{k-1}] [..., r] and x_k [...]; 0 (c = ½) without a head."""
        if self.confidence_head is None:
            return torch.zeros(h.shape[:-1], device=h.device)
        reads_draft = self.confidence_head.kind == "mlp"
        drafted = nn.functional.embedding(drafted_ids, self.embed_weight) if reads_draft else None
        return self.confidence_head(h, previous, drafted)

    def rollout(
        self, h: Tensor, anchor_ids: Tensor, choose: Callable[[Tensor, int], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The sequential part of drafting: choose x_k, feed it to the Markov head, go on.

        Args:
            h: [..., γ, d] from `block`.
            anchor_ids: x_0 [...] int64.
            choose: maps (logits L_k [..., V'] fp32, k from 0) to draft-vocabulary indices
                [...] int64: an argmax, or a draw that the caller records.

        Returns:
            Drafted target ids [..., γ] int64 and confidence logits [..., γ] fp32.
        """
        base = self.base_logits(h)
        tokens, previous_rows, state, last = [], [], None, anchor_ids
        for k in range(h.shape[-2]):
            logits = base[..., k, :].float()
            if self.markov_head is not None:
                previous = self.markov_head.embed(last)
                mixed, state = self.markov_head.mix(previous, h[..., k, :], state)
                logits = logits + self.markov_head.bias(mixed)
                previous_rows.append(previous)
            last = self.to_target_ids(choose(logits, k))
            tokens.append(last)
        drafted = torch.stack(tokens, dim=-1)
        previous_all = torch.stack(previous_rows, dim=-2) if previous_rows else None
        return drafted, self.confidence_logits(h, previous_all, drafted)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The RoPE cosines and sines, each [..., D] fp32, of absolute positions [...]."""
        if self._inverse_frequency.device != positions.device:
            self._inverse_frequency = self._inverse_frequency.to(positions.device)
        angles = positions[..., None].float() * self._inverse_frequency
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE, half-split layout of Llama and Qwen: x [..., heads, D], cos and sin [..., D] → x's dtype."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x * cos.unsqueeze(-2).to(x.dtype) + turned * sin.unsqueeze(-2).to(x.dtype)


def argmax_choice(logits: Tensor, _slot: int) -> Tensor:
    """The deterministic draft: logits [..., V'] → index of the largest [...]."""
    return logits.argmax(dim=-1)
