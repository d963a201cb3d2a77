"""Who may draft from what: the slots of drafted context, and the bounded memory behind them.

A slot holds one request's context keys and values, the last W positions of it, in a ring per layer. The
drafter is a cache of what the verifier knows: whatever is missing here is named, and fed again.

Symbols: W window · L draft layers · G key/value heads · D head size · S block slots · N rows written at once.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_ray.errors import ConfigError


@dataclass(slots=True)
class Slot:
    """Where one request's context lies. Positions are absolute; ranges are half-open."""

    index: int
    """Row of the cache tensor."""
    mask_start: int = 0
    """Context before this position is masked for good: nobody has it."""
    origin: int = 0
    """Position stored in ring row 0; position p lies in row (p - origin) % W."""
    low: int = 0
    """Oldest position still stored."""
    have: int = 0
    """Positions [low, have) are stored; the next feature expected is that of `have`."""


class SlotTable:
    """Assigns slots to keys and keeps track of the positions they hold. No tensors in here.

    Args:
        capacity: slots.
        window: W, positions that a block sees and a slot keeps.
    """

    def __init__(self, capacity: int, window: int):
        self.capacity = capacity
        self.window = window
        self._slots: OrderedDict[str, Slot] = OrderedDict()  # least recently used first
        self._free = list(range(capacity))  # a heap: low indices first keep the rows of a batch adjacent

    def __len__(self) -> int:
        return len(self._slots)

    def missing_from(self, key: str, base_position: int, count: int, *, fresh: bool) -> int | None:
        """Whether features [base_position, base_position + count) complete the slot's window.

        Returns:
            None when they do, else the first position whose feature is wanted and not there.
        """
        if fresh:
            return None
        slot = self._slots.get(key) or Slot(-1)
        wanted = max(min(slot.mask_start, base_position), base_position + count - self.window)
        held_from = slot.low if slot.low <= base_position <= slot.have else base_position
        if held_from <= wanted:
            return None
        return max(slot.have, wanted) if base_position > slot.have else wanted

    def touch(self, keys: Iterable[str]) -> None:
        """Mark slots as used now, so that the other slots are evicted before them."""
        for key in keys:
            if key in self._slots:
                self._slots.move_to_end(key)

    def extend(self, key: str, base_position: int, count: int, *, fresh: bool) -> tuple[Slot, int]:
        """Truncate the slot to base_position and make room for `count` positions from there.

        Call it only where `missing_from` is None. A slot is taken for an unknown key, from the least recently
        used one when none is free.

        Returns:
            The slot and the first position to write; positions older than the window are left out.
        """
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = Slot(self._take_index())
        self._slots.move_to_end(key)
        end = base_position + count
        first = max(base_position, end - self.window)
        joins = slot.low <= base_position <= slot.have and first == base_position
        slot.mask_start = base_position if fresh else min(slot.mask_start, base_position)
        if fresh or not joins:
            slot.origin = slot.low = first
        slot.have = end
        slot.low = max(slot.low, end - self.window)
        return slot, first

    def release(self, keys: Iterable[str]) -> None:
        """Give slots back; unknown keys are fine."""
        for key in keys:
            if (slot := self._slots.pop(key, None)) is not None:
                heapq.heappush(self._free, slot.index)

    def _take_index(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        _, oldest = self._slots.popitem(last=False)
        return oldest.index


class ContextCache:
    """Key/value storage of all slots: one tensor, allocated once.

    Ring rows 0..W-1 hold context. A block's own keys and values are written behind its slot's context (row
    `length` on, hence S spare rows) so that attention reads one run of rows; they do not count as context and
    the next append overwrites them.

    Args:
        layers: L.
        kv_heads: G.
        head_dim: D.
        window: W.
        block_slots: S at most.
        cache_bytes: memory budget.
        max_batch: slots that one call may need at once.
        device: where the memory is.
        dtype: of keys and values.

    Raises:
        ConfigError: the budget does not hold max_batch slots.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        window: int,
        block_slots: int,
        cache_bytes: int,
        max_batch: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        rows = window + block_slots
        slot_bytes = layers * 2 * kv_heads * rows * head_dim * dtype.itemsize
        capacity = cache_bytes // slot_bytes
        if capacity < max_batch:
            raise ConfigError(
                f"cache_bytes {cache_bytes} holds {capacity} slots of {slot_bytes} bytes, fewer than max_batch "
                f"{max_batch}: set drafter.cache_mib to {max_batch * slot_bytes / 2**20:.1f} or more, "
                "or drafter.window_tokens lower"
            )
        self.table = SlotTable(capacity, window)
        self.kv_heads = kv_heads
        # [L, capacity, 2G, W+S, D]: keys in the first G heads, then values. Every row is finite, even
        # a masked one: an attention weight of 0 does not silence a NaN that an earlier request left.
        self._rows = torch.zeros(layers, capacity, 2 * kv_heads, rows, head_dim, dtype=dtype, device=device)

    def write(self, slots: Tensor, rows: Tensor, keys_values: Tensor) -> None:
        """Store context rows of all layers.

        Args:
            slots: [N] int64.
            rows: [N] int64.
            keys_values: [L, N, 2G, D].
        """
        self._rows.transpose(2, 3)[:, slots, rows] = keys_values.nan_to_num()

    def write_block(self, layer: int, batch: "BlockRows", keys_values: Tensor) -> None:
        """Store a block's keys and values [B, S, 2G, D] of one layer behind the context."""
        if batch.uniform_length is not None and isinstance(batch.slots, slice):
            first = batch.uniform_length
            target = self._rows[layer, batch.slots, :, first : first + keys_values.shape[1]]
            target.copy_(keys_values.transpose(1, 2))
        else:
            self._rows[layer].transpose(1, 2)[batch.slot_ids[:, None], batch.block_rows] = keys_values

    def read(self, layer: int, batch: "BlockRows") -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, R, D] of context and block: a view where the slots are adjacent."""
        rows = (
            self._rows[layer, batch.slots, :, : batch.row_count]
            if isinstance(batch.slots, slice)
            else (self._rows[layer, :, :, : batch.row_count].index_select(0, batch.slots))
        )
        return rows[:, : self.kv_heads], rows[:, self.kv_heads :]


@dataclass(frozen=True)
class BlockRows:
    """The cache rows that a batch of blocks reads and writes, in ascending order of slots.

    Attributes:
        slots: the batch's slots: a slice when adjacent, else [B] int64.
        slot_ids: [B] int64, the same as a tensor.
        block_rows: [B, S] int64, rows of the blocks' own keys and values.
        row_count: R, rows to read.
        uniform_length: context rows of every slot, when they are the same number; else None.
        mask: [B, 1, 1, R] bool, true where a block may look; None when it may look everywhere.
    """

    slots: slice | Tensor
    slot_ids: Tensor
    block_rows: Tensor
    row_count: int
    uniform_length: int | None
    mask: Tensor | None

    @classmethod
    def build(
        cls,
        slot_ids: Sequence[int],
        context_lens: Sequence[int],
        block_lens: Sequence[int],
        device: torch.device,
    ) -> "BlockRows":
        """Lay out blocks.

        Args:
            slot_ids: B slots, ascending.
            context_lens: context rows of each.
            block_lens: block slots of each, at least 1; shorter blocks are padded to the longest.
            device: where tensors go.
        """
        longest = max(block_lens)
        row_count = max(context_lens) + longest
        ids, lengths, blocks = torch.tensor([slot_ids, context_lens, block_lens], device=device)
        adjacent = slot_ids[-1] - slot_ids[0] == len(slot_ids) - 1
        uniform = min(context_lens) == max(context_lens)
        mask = None
        if not (uniform and min(block_lens) == longest):
            ends = (lengths + blocks)[:, None, None, None]
            mask = torch.arange(row_count, device=device) < ends
        return cls(
            slots=slice(slot_ids[0], slot_ids[-1] + 1) if adjacent else ids,
            slot_ids=ids,
            block_rows=lengths[:, None] + torch.arange(longest, device=device),
            row_count=row_count,
            uniform_length=context_lens[0] if uniform else None,
            mask=mask,
        )
