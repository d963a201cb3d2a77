"""Features of shared prefixes, kept by the same blocks of tokens as the engine's prefix cache.

After a prefix hit the engine computes no hidden states for the cached positions, so the drafter would begin
without context. Features follow from the token prefix alone; a full block of them is kept under a hash of all
tokens up to its end, within a bounded memory, and put before the request's own features on a hit.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dspark_ray.target.feature_store import FEATURE_DTYPE


@dataclass
class PrefixReader:
    """One request's place in the cache: its chain of block hashes, and the block that is not full yet."""

    keys: list[bytes] = field(default_factory=list)
    position: int = 0
    """Position of the next row expected."""
    parts: list[Tensor] = field(default_factory=list)
    """Rows of the block that contains `position`, from the block's beginning."""


class PrefixFeatures:
    """Least recently used blocks of feature rows.

    Args:
        block_size: tokens of a block, the engine's own.
        width: d.
        capacity_bytes: of rows; 0 keeps nothing.
    """

    def __init__(self, block_size: int, width: int, capacity_bytes: int):
        self._block = block_size
        self._most = capacity_bytes // (block_size * width * FEATURE_DTYPE.itemsize)
        self._blocks: OrderedDict[bytes, Tensor] = OrderedDict()
        self.hits = self.misses = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def restore(self, reader: PrefixReader, tokens: np.ndarray, computed: int, window: int) -> Tensor | None:
        """Rows that end at position `computed`, as far back as the window and the cache go.

        Args:
            reader: of the request.
            tokens: [n] int32, the request's token ids, at least `computed` of them.
            computed: positions for which the engine computes no hidden states.
            window: W.

        Returns:
            [k, d] with k ≤ W rows of positions computed-k..computed-1, or None.
        """
        reader.position, reader.parts = computed, []
        if computed % self._block:
            return None
        found: list[Tensor] = []
        last = computed // self._block
        for block in range(last - 1, max(-1, (computed - window) // self._block - 1), -1):
            rows = self._blocks.get(self._key(reader, tokens, block))
            if rows is None:
                break
            self._blocks.move_to_end(reader.keys[block])
            found.insert(0, rows)
        self.hits += bool(found)
        self.misses += not found
        return torch.cat(found)[-window:] if found else None

    def record(self, reader: PrefixReader, tokens: np.ndarray, position: int, rows: Tensor) -> None:
        """Keep the blocks that become full with rows [n, d] of positions from `position` on.

        Args:
            reader: of the request.
            tokens: [m] int32, the request's committed token ids, at least position + n of them.
            position: of rows[0].
            rows: valid features.
        """
        if not self._most:
            return
        if position != reader.position:
            reader.position, reader.parts = position, []
        while len(rows):
            offset = reader.position % self._block
            take = min(self._block - offset, len(rows))
            if offset == 0:
                reader.parts = []
            whole = offset == sum(map(len, reader.parts))
            if whole:
                reader.parts.append(rows[:take].to(FEATURE_DTYPE, copy=True))
            reader.position += take
            rows = rows[take:]
            if offset + take == self._block:
                if whole:
                    self._put(self._key(reader, tokens, reader.position // self._block - 1), reader.parts)
                reader.parts = []

    def _put(self, key: bytes, parts: list[Tensor]) -> None:
        self._blocks[key] = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._blocks.move_to_end(key)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def _key(self, reader: PrefixReader, tokens: np.ndarray, block: int) -> bytes:
        """Hash of all tokens up to the end of a block; the chain is extended as far as needed."""
        keys = reader.keys
        while len(keys) <= block:
            first = len(keys) * self._block
            part = np.ascontiguousarray(tokens[first : first + self._block], dtype=np.int32)
            keys.append(
                hashlib.blake2b((keys[-1] if keys else b"") + part.tobytes(), digest_size=16).digest()
            )
        return keys[block]
