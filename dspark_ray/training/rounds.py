"""Real speculative decoding of many prompts at once, with a Hugging Face target, to measure a drafter.

Drafts come from the same `DraftRunner` that serves; they are argmax, and every round verifies the whole
block. Acceptance is exact match with the target's own choice at each position (the coupled rule), at any
temperature.

Shapes: B requests · γ drafts a round · R rounds · V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark_ray.decoding.acceptance import matching_prefix_len
from dspark_ray.drafter.model import FeatureProjection
from dspark_ray.drafter.runner import DraftItem, DraftRunner

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Rounds:
    """What happened in R rounds that verified all γ drafts.

    Attributes:
        confidence_logits: z of each draft, [R, γ].
        accept_len: A, leading drafts that the target also chose, [R]. Counted past a stop token too.
        emitted: tokens that the round gave its request, [R]; A+1, less where it stopped.
        request: which prompt the round belongs to, [R].
        outputs: every prompt's tokens.
    """

    confidence_logits: Array
    accept_len: Array
    emitted: Array
    request: Array
    outputs: dict[int, list[int]]


@dataclass
class _Request:
    index: int
    position: int  # of the anchor
    anchor: int
    features: Tensor  # rows not yet given to the drafter, up to the anchor
    tokens: list[int] = field(default_factory=list)


class _CachedTarget:
    """A causal LM over a shrinking batch; rejected rows stay in its cache behind the attention mask."""

    def __init__(self, model: Any, layer_ids: Sequence[int]):
        from transformers import DynamicCache

        self._model, self._layer_ids = model, layer_ids
        self._cache = DynamicCache(config=model.config)
        self.mask = torch.zeros(0)  # [B, cached] int64

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Run [B, n] tokens; returns final hidden states [B, n, d] and taps [B, n, m·d]."""
        self.mask = torch.cat([self.mask, mask], dim=1) if self.mask.ndim == 2 else mask
        out = self._model.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=self.mask,
            cache=self._cache,
            output_hidden_states=True,
            use_cache=True,
        )
        taps = torch.cat([out.hidden_states[layer + 1] for layer in self._layer_ids], dim=-1)
        return out.last_hidden_state, taps

    def keep(self, rows: Tensor) -> None:
        """Drop all requests but these."""
        self._cache.batch_select_indices(rows)
        self.mask = self.mask[rows]


class RoundRunner:
    """Target, drafter and sampling settings.

    Args:
        target: Hugging Face causal LM without gradients.
        projection: the drafter's feature projection, in the target's dtype.
        layer_ids: tap layers.
        runner: drafts; its window bounds the context.
        draft_len: γ' of every round.
        temperature: of the target's draws; below 1e-5 it takes the argmax.
        stop_ids: tokens that end an answer.
        seed: of the draws.
    """

    def __init__(
        self,
        target: Any,
        projection: FeatureProjection,
        layer_ids: Sequence[int],
        runner: DraftRunner,
        *,
        draft_len: int,
        temperature: float,
        stop_ids: Sequence[int],
        seed: int,
    ):
        self._target, self._projection, self._layer_ids = target, projection, layer_ids
        self._runner, self._draft_len = runner, draft_len
        self._temperature, self._stop_ids = temperature, frozenset(stop_ids)
        self._generator = torch.Generator().manual_seed(seed)

    def run(self, prompts: Sequence[list[int]], max_new_tokens: int, batch_size: int) -> Iterator[Rounds]:
        """Decode prompts in batches of like length; yields what each batch's rounds did."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            yield self._run_batch({i: prompts[i] for i in chosen}, max_new_tokens)

    @torch.inference_mode()
    def _run_batch(self, prompts: dict[int, list[int]], max_new_tokens: int) -> Rounds:
        target = _CachedTarget(self._target, self._layer_ids)
        requests = self._prefill(target, prompts)
        outputs = {request.index: request.tokens for request in requests}
        log: list[tuple[Tensor, int, int, int]] = []
        live = self._drop_finished(target, requests, max_new_tokens)
        while live:
            drafted, z = self._draft(live)
            accepted = self._verify(target, live, drafted)
            for row, request in enumerate(live):
                log.append((z[row], *accepted[row], request.index))
            live = self._drop_finished(target, live, max_new_tokens)
        self._runner.free(str(index) for index in prompts)
        columns = list(zip(*log, strict=True)) or [[], [], [], []]
        logits = torch.stack(columns[0]).numpy() if log else np.zeros((0, self._draft_len))
        return Rounds(logits, *(np.array(column, dtype=np.int64) for column in columns[1:]), outputs)

    def _prefill(self, target: _CachedTarget, prompts: dict[int, list[int]]) -> list[_Request]:
        width = max(map(len, prompts.values()))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        lengths = torch.tensor([len(prompt) for prompt in prompts.values()])
        for row, prompt in enumerate(prompts.values()):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        positions = torch.arange(width).expand_as(ids)
        hidden, taps = target.forward(ids, positions, (positions < lengths[:, None]).long())
        last = hidden[torch.arange(len(prompts)), lengths - 1]
        first = self._choose(last[:, None])[:, 0].tolist()
        features = self._projection(taps)
        return [
            _Request(index, len(prompt), first[row], features[row, : len(prompt)], [first[row]])
            for row, (index, prompt) in enumerate(prompts.items())
        ]

    def _draft(self, live: list[_Request]) -> tuple[Tensor, Tensor]:
        """Drafts [B, γ'] and their confidence logits."""
        items = [
            DraftItem(str(r.index), r.position - len(r.features), r.features, r.anchor, self._draft_len)
            for r in live
        ]
        result = self._runner.draft(items)
        return result.draft_token_ids[:, : self._draft_len], result.confidence_logits[:, : self._draft_len]

    def _verify(self, target: _CachedTarget, live: list[_Request], drafted: Tensor) -> list[tuple[int, int]]:
        """Feed anchors and drafts, accept, commit; returns (A, emitted) of each request."""
        ids = torch.cat([torch.tensor([[r.anchor] for r in live]), drafted], dim=1)
        positions = torch.tensor([[r.position] for r in live]) + torch.arange(ids.shape[1])
        hidden, taps = target.forward(ids, positions, torch.ones_like(ids))
        chosen = self._choose(hidden)
        accepted = matching_prefix_len(drafted, chosen[:, :-1])
        # rows 0..A carried committed tokens; what was rejected is hidden from later steps
        target.mask[:, -ids.shape[1] :] = (torch.arange(ids.shape[1]) <= accepted[:, None]).long()
        features = self._projection(taps)
        outcome = []
        for row, (request, count) in enumerate(zip(live, accepted.tolist(), strict=True)):
            committed = chosen[row, : count + 1].tolist()
            stop = next((at for at, token in enumerate(committed) if token in self._stop_ids), count)
            request.tokens += committed[: stop + 1]
            request.features = features[row, : count + 1]
            request.position += count + 1
            request.anchor = committed[-1]
            outcome.append((count, stop + 1))
        return outcome

    def _choose(self, hidden: Tensor) -> Tensor:
        """The target's own token after each row: hidden [B, n, d] → [B, n]."""
        logits = torch.nn.functional.linear(hidden, self._target.get_output_embeddings().weight)
        if self._temperature < 1e-5:
            return logits.argmax(-1)
        probs = (logits.float() / self._temperature).softmax(-1)
        return torch.multinomial(probs.flatten(0, 1), 1, generator=self._generator).view(logits.shape[:-1])

    def _drop_finished(
        self, target: _CachedTarget, requests: list[_Request], max_new_tokens: int
    ) -> list[_Request]:
        going = [
            row
            for row, r in enumerate(requests)
            if r.tokens[-1] not in self._stop_ids and len(r.tokens) < max_new_tokens
        ]
        if len(going) < len(requests) and going:
            target.keep(torch.tensor(going))
        return [requests[row] for row in going]
