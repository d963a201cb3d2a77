"""The two small heads on top of the draft backbone: Markov bias and confidence (dspark-spec section 1).

Symbols: d hidden size · r Markov rank · V target vocabulary · V' draft vocabulary · γ draft positions ·
h_k final-norm hidden state of slot k · x_{k-1} the token before slot k (the anchor for k = 1).
"""

from typing import Literal

import torch
from torch import Tensor, nn

MarkovKind = Literal["vanilla", "gated", "rnn"]
ConfidenceKind = Literal["linear", "mlp"]


class MarkovHead(nn.Module):
    """A low-rank bias on slot k's logits that depends on the token before it.

    vanilla: W2·e with e = W1[x_{k-1}], times a learnable scalar when `temp_scale` is set.
    gated:   W2·(σ(G[h_k; e]) ⊙ e).
    rnn:     (g, c, o) = J[state; e; h_k]; state ← σ(g)·state + (1-σ(g))·tanh(c); bias = W2·tanh(o).

    Args:
        kind: which of the three forms.
        vocab_size: V, rows of W1.
        draft_vocab_size: V', rows of W2.
        rank: r > 0. Rank 0 means that the model has no such head.
        hidden_size: d.
        temp_scale: whether the vanilla bias has a learnable scale (initialised to 0.1).
    """

    def __init__(
        self,
        kind: MarkovKind,
        vocab_size: int,
        draft_vocab_size: int,
        rank: int,
        hidden_size: int,
        *,
        temp_scale: bool = False,
    ):
        super().__init__()
        self.kind = kind
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)
        self.temp_scale = nn.Parameter(torch.tensor(0.1)) if temp_scale else None

    def embed(self, previous_ids: Tensor) -> Tensor:
        """W1[x_{k-1}]: ids [...] int64 (target vocabulary) → [..., r]."""
        return self.markov_w1(previous_ids)

    def mix(self, previous: Tensor, h: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What W2 is applied to in one slot.

        Args:
            previous: `embed(x_{k-1})`, [..., r].
            h: h_k, [..., d].
            state: what the previous slot's call returned; None at k = 1.

        Returns:
            [..., r] and the state for the next slot (None unless `kind` is rnn).
        """
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([h, previous], dim=-1))) * previous, None
        if self.kind == "rnn":
            state = torch.zeros_like(previous) if state is None else state
            gate, candidate, out = self.joint_proj(torch.cat([state, previous, h], dim=-1)).chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(candidate)
        return previous, None

    def mix_all(self, previous: Tensor, h: Tensor) -> Tensor:
        """`mix` of all slots, teacher-forced: previous [..., γ, r] and h [..., γ, d] → [..., γ, r]."""
        if self.kind != "rnn":
            return self.mix(previous, h, None)[0]
        mixed, state = [], None
        for k in range(h.shape[-2]):
            row, state = self.mix(previous[..., k, :], h[..., k, :], state)
            mixed.append(row)
        return torch.stack(mixed, dim=-2)

    def bias(self, mixed: Tensor) -> Tensor:
        """The bias [..., V'] from `mix` [..., r]."""
        bias = self.markov_w2(mixed)
        return bias if self.temp_scale is None else bias * self.temp_scale


class ConfidenceHead(nn.Module):
    """The logit z_k of "the target accepts x_k, given that it accepted x_1..x_{k-1}".

    linear: w·[h_k; W1[x_{k-1}]] + b, blind to x_k, so a verify length taken from it is exact for sampled
    drafts too. mlp: Linear(2d → d/2), GELU, Linear(→ 1) on [h_k; E(x_k)]; it sees the drafted token, which is
    exact only for argmax drafts or coupled verification (dspark-spec section 4).

    Args:
        kind: linear or mlp.
        hidden_size: d.
        markov_rank: r when the linear head also reads W1[x_{k-1}], else 0.
    """

    def __init__(self, kind: ConfidenceKind, hidden_size: int, markov_rank: int):
        super().__init__()
        self.kind = kind
        self.reads_markov = kind == "linear" and markov_rank > 0
        if kind == "linear":
            self.proj: nn.Module = nn.Linear(hidden_size + markov_rank, 1)
        else:
            self.proj = nn.Sequential(
                nn.Linear(2 * hidden_size, hidden_size // 2), nn.GELU(), nn.Linear(hidden_size // 2, 1)
            )

    def forward(self, h: Tensor, previous: Tensor | None, drafted_embedding: Tensor | None) -> Tensor:
        """Confidence logits.

        Args:
            h: [..., d].
            previous: W1[x_{k-1}] [..., r]; read by the linear head of a model that has a Markov head.
            drafted_embedding: E(x_k) [..., d], the target's embedding; read by the mlp head only.

        Returns:
            [...], fp32 so that products of sigmoids and thresholds are stable.
        """
        if self.kind == "mlp":
            joined = torch.cat([h, drafted_embedding.to(h.dtype)], dim=-1)
        elif self.reads_markov:
            joined = torch.cat([h, previous.to(h.dtype)], dim=-1)
        else:
            joined = h
        return self.proj(joined).squeeze(-1).float()
