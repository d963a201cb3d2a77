"""Batched drafting: many requests, each with its own context, position and draft length, in one call.

Symbols: B requests · γ draft positions of the checkpoint · γ' of one request · n new features ·
d hidden size · s the anchor's position.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_ray.drafter.context_cache import BlockRows, ContextCache, Slot
from dspark_ray.drafter.fused import FusedLayers
from dspark_ray.drafter.model import DSparkModel, argmax_choice
from dspark_ray.errors import ProtocolError


@dataclass(frozen=True)
class DraftItem:
    """One request of a draft call. The anchor stands at base_position + n."""

    key: str
    """Slot of the request: its server-made uuid and child index."""
    base_position: int
    """Absolute position of features[0]. Below what the slot has: the slot is truncated to it first."""
    features: Tensor
    """[n, d] projected context features of positions base_position..base_position+n-1; n may be 0."""
    anchor_token_id: int
    """Last token the target produced, in the target's vocabulary."""
    draft_len: int
    """γ', at most the checkpoint's γ; 0 only feeds the context."""
    fresh: bool = False
    """Start the slot anew at base_position; context before it is masked."""


@dataclass(frozen=True)
class DraftResult:
    """The drafts of one call, rows in the order of its items."""

    draft_token_ids: Tensor
    """[B, γ] int64, target vocabulary; -1 where nothing was drafted."""
    confidence_logits: Tensor
    """[B, γ] float32; 0 where nothing was drafted."""
    missing_from: list[int | None]
    """First position whose feature is missing, so that nothing was stored or drafted; None when fine."""
    hidden: Tensor | None
    """[B, γ, d] final-norm hidden states, on request."""


class DraftRunner:
    """A drafter with the context of many requests.

    Args:
        model: the drafter with the target's embedding and lm_head attached. It is copied when dtype or device
            differ from its own.
        cache_bytes: memory for context; decides the number of slots.
        window: context positions kept for each request; the checkpoint's own window when that is smaller.
        max_batch: requests in one call at most.
        device: where to run.
        dtype: of weights, activations and cache.

    Raises:
        ConfigError: cache_bytes does not hold max_batch slots.
    """

    def __init__(
        self,
        model: DSparkModel,
        *,
        cache_bytes: int,
        window: int,
        max_batch: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ):
        self._device = torch.device(device)
        if model.dtype != dtype or model.norm.weight.device != self._device:
            model = copy.deepcopy(model).to(self._device, dtype)
        self._model = model.eval()
        self._config = config = model.config
        self._dtype = dtype
        self._max_batch = max_batch
        with torch.inference_mode():
            self._layers = FusedLayers(model)
            self._cache = ContextCache(
                layers=config.num_hidden_layers,
                kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                window=min(window, config.sliding_window or window),
                block_slots=config.block_size,
                cache_bytes=cache_bytes,
                max_batch=max_batch,
                device=self._device,
                dtype=dtype,
            )
        self._table = self._cache.table

    @property
    def model(self) -> DSparkModel:
        """The drafter, in the runner's dtype and on its device."""
        return self._model

    @property
    def capacity(self) -> int:
        """Requests whose context fits at once."""
        return self._table.capacity

    @property
    def slots_in_use(self) -> int:
        """Requests whose context is held now."""
        return len(self._table)

    @property
    def window(self) -> int:
        """Context positions kept for each request."""
        return self._table.window

    def free(self, keys: Iterable[str]) -> None:
        """Forget requests; unknown keys are fine."""
        self._table.release(keys)

    def check_item(self, item: DraftItem) -> None:
        """Refuse an item that cannot be drafted, before anything is touched.

        Raises:
            ProtocolError: naming the field.
        """
        config = self._config
        if not 0 <= item.draft_len <= config.num_draft_tokens:
            raise ProtocolError(
                f"draft_len {item.draft_len} of {item.key!r} is outside 0..{config.num_draft_tokens}, "
                "the block that the checkpoint was trained for"
            )
        if item.features.ndim != 2 or item.features.shape[1] != config.hidden_size:
            raise ProtocolError(
                f"features of {item.key!r} are {list(item.features.shape)}, "
                f"expected [n, {config.hidden_size}]"
            )
        if item.base_position < 0:
            raise ProtocolError(f"base_position {item.base_position} of {item.key!r} is negative")
        if not 0 <= item.anchor_token_id < config.vocab_size:
            raise ProtocolError(
                f"anchor_token_id {item.anchor_token_id} of {item.key!r} is outside the vocabulary "
                f"0..{config.vocab_size - 1}"
            )

    @torch.inference_mode()
    def draft(
        self,
        items: Sequence[DraftItem],
        *,
        return_hidden: bool = False,
        choose: Callable[[Tensor, int], Tensor] = argmax_choice,
    ) -> DraftResult:
        """Append new context and draft.

        Args:
            items: at most max_batch, keys all different. An item whose features do not join up with its slot
                is answered by `missing_from` and changes nothing; the others are not affected.
            return_hidden: also return h_k, from which the verifier can rebuild q.
            choose: picks draft-vocabulary ids [B'] from fp32 logits [B', V'] of slot k; rows are the drafting
                items in order. Argmax by default.

        Raises:
            ProtocolError: an item is malformed, a key comes twice, or there are too many; nothing changed.
        """
        if len(items) > self._max_batch:
            raise ProtocolError(f"{len(items)} items in one draft call, at most {self._max_batch} are served")
        if len({item.key for item in items}) != len(items):
            raise ProtocolError("one key twice in a draft call")
        for item in items:
            self.check_item(item)
        result = self._empty_result(items, return_hidden=return_hidden)
        live = [i for i, missing in enumerate(result.missing_from) if missing is None]
        try:
            slots = dict(zip(live, self._append([items[i] for i in live]), strict=True))
            drafting = [i for i in live if items[i].draft_len > 0]
            if drafting:
                self._draft_blocks(items, drafting, slots, result, choose)
        except BaseException:
            self.free(items[i].key for i in live)  # their slots may claim rows that were never written
            raise
        return result

    def _empty_result(self, items: Sequence[DraftItem], *, return_hidden: bool) -> DraftResult:
        shape = (len(items), self._config.num_draft_tokens)
        hidden_shape = (*shape, self._config.hidden_size)
        return DraftResult(
            torch.full(shape, -1, dtype=torch.int64, device=self._device),
            torch.zeros(shape, device=self._device),
            [self._table.missing_from(i.key, i.base_position, len(i.features), fresh=i.fresh) for i in items],
            torch.zeros(hidden_shape, dtype=self._dtype, device=self._device) if return_hidden else None,
        )

    def _append(self, items: Sequence[DraftItem]) -> list[Slot]:
        """Store the new context rows of all items and return their slots."""
        table = self._table
        table.touch(item.key for item in items)
        slots, features, where = [], [], []
        for item in items:
            slot, first = table.extend(item.key, item.base_position, len(item.features), fresh=item.fresh)
            slots.append(slot)
            if first < slot.have:
                features.append(item.features[first - item.base_position :])
                where += [(slot.index, (p - slot.origin) % table.window, p) for p in range(first, slot.have)]
        if where:
            joined = features[0] if len(features) == 1 else torch.cat(features)
            ids, rows, positions = torch.tensor(where, device=self._device).unbind(1)
            keys_values = self._layers.context_kv(joined.to(self._device, self._dtype), positions)
            self._cache.write(ids, rows, keys_values)
        return slots

    def _draft_blocks(
        self,
        items: Sequence[DraftItem],
        drafting: list[int],
        slots: dict[int, Slot],
        result: DraftResult,
        choose: Callable[[Tensor, int], Tensor],
    ) -> None:
        by_slot = sorted(drafting, key=lambda i: slots[i].index)
        unused = (
            0 if self._config.sample_from_anchor else 1
        )  # DFlash layout: the anchor's slot predicts nothing
        batch = BlockRows.build(
            [slots[i].index for i in by_slot],
            [slots[i].have - slots[i].low for i in by_slot],
            [items[i].draft_len + unused for i in by_slot],
            self._device,
        )
        place = {i: at for at, i in enumerate(by_slot)}
        numbers = torch.tensor(
            [
                [items[i].anchor_token_id for i in by_slot],
                [slots[i].have for i in by_slot],
                [place[i] for i in drafting],
                [items[i].draft_len for i in drafting],
                drafting,
            ],
            device=self._device,
        )
        anchors, positions, order, lengths, rows = numbers
        h = self._layers.block(anchors, positions, batch, self._cache)[:, unused:]
        if by_slot != drafting:
            anchors, h = anchors[order], h[order]
        drafted, confidence = self._model.rollout(h, anchors, choose)
        width = drafted.shape[1]
        beyond = torch.arange(width, device=self._device) >= lengths[:, None]
        result.draft_token_ids[rows, :width] = drafted.masked_fill(beyond, -1)
        result.confidence_logits[rows, :width] = confidence.masked_fill(beyond, 0.0)
        if result.hidden is not None:
            result.hidden[rows, :width] = h.masked_fill(beyond[:, :, None], 0.0)
