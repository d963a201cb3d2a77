"""The contexts of all requests in one worker: appended by steps, restored after prefix hits, handed over.

Shared by verifying and prefilling workers. Knows nothing of vLLM but plain data about requests.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from dspark_ray.target.feature_store import ContextRows
from dspark_ray.target.handoff import (
    HANDOFF_ENDPOINT_KEY,
    HANDOFF_KEY,
    HandoffFetcher,
    HandoffStore,
)
from dspark_ray.target.prefix_features import PrefixFeatures, PrefixReader
from dspark_ray.target.stats import ShimStats


@dataclass(frozen=True)
class StartedRequest:
    """A request that the engine schedules for the first time."""

    key: str
    computed: int
    """Positions for which it computes no hidden states: a prefix hit, or KV that came from elsewhere."""
    tokens: np.ndarray
    """[n] token ids of its prompt."""
    extra_args: dict[str, Any]


@dataclass(frozen=True)
class StepRow:
    """What one request did in a step."""

    key: str
    position: int
    """Absolute position of its first row."""
    rows: int
    """Valid rows: rejected drafts are not among them."""
    tokens: np.ndarray
    """[n] committed token ids, the anchor included."""
    anchor_token_id: int | None
    """Last token produced; None inside the prompt."""
    room: int = 0
    """Drafts that the next step could verify: context end and tokens left."""
    temperature: float = 0.0
    verified: int = 0
    """Drafts verified in this step."""
    accepted: int = 0


@dataclass
class _Request:
    context: ContextRows
    prefix: PrefixReader = field(default_factory=PrefixReader)
    handoff: str | None = None
    """Id under which the prompt's features are offered (prefill) or still expected (verifier)."""


class RequestContexts:
    """Feature rows of the running requests.

    Args:
        window: W.
        width: d.
        prefix: features of shared prefixes; None where the engine caches none.
        stats: counted into.
        fetcher: asks prefill workers (verifier).
        offers: where finished prompts are put (prefill worker).
    """

    def __init__(
        self,
        window: int,
        width: int,
        *,
        prefix: PrefixFeatures | None,
        stats: ShimStats,
        fetcher: HandoffFetcher | None = None,
        offers: HandoffStore | None = None,
    ):
        self._window = window
        self._width = width
        self._prefix = prefix
        self._stats = stats
        self._fetcher = fetcher
        self._offers = offers
        self._requests: dict[str, _Request] = {}
        self._expected: dict[str, str] = {}  # hand-off id -> request key

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, key: str) -> bool:
        return key in self._requests

    def __getitem__(self, key: str) -> ContextRows:
        return self._requests[key].context

    def begin_anew(self, keys: Iterable[str]) -> None:
        """Take up requests that run already; what they have computed so far is not known."""
        for key in keys:
            self._requests[key] = _Request(ContextRows(self._window, self._width))

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the running requests."""
        return tuple(self._requests)

    def close(self) -> None:
        """Give back sockets."""
        if self._fetcher is not None:
            self._fetcher.close()

    def finish(self, keys: Iterable[str]) -> list[str]:
        """Forget requests; returns those that were known."""
        known = []
        for key in keys:
            if (request := self._requests.pop(key, None)) is not None:
                known.append(key)
                if request.handoff is not None:
                    self._expected.pop(request.handoff, None)
        return known

    def start(self, started: Sequence[StartedRequest]) -> None:
        """Take up new requests; asks for prompt features that are to come from elsewhere."""
        for new in started:
            request = self._requests[new.key] = _Request(ContextRows(self._window, self._width))
            handoff = new.extra_args.get(HANDOFF_KEY)
            if self._offers is not None:
                request.handoff = handoff
            if new.computed <= 0:
                continue
            if self._restore(request, new):
                continue
            endpoint = new.extra_args.get(HANDOFF_ENDPOINT_KEY)
            if self._fetcher is not None and handoff and endpoint:
                request.handoff = handoff
                self._expected[handoff] = new.key
                self._fetcher.ask(endpoint, handoff)

    def _restore(self, request: _Request, new: StartedRequest) -> bool:
        """Begin with features of a cached prefix; true when they are all that the window can hold."""
        if self._prefix is None:
            return False
        restored = self._prefix.restore(request.prefix, new.tokens, new.computed, self._window)
        if restored is None:
            return False
        request.context.append(new.computed - len(restored), restored)
        self._stats.prefix_restored += 1
        return len(restored) == min(new.computed, self._window)

    def advance(self, rows: Sequence[StepRow], features: Tensor) -> None:
        """Append a step's features.

        Args:
            rows: one for each request in the step, in the order of its features.
            features: [sum of rows, d], valid rows only.
        """
        first = 0
        for row in rows:
            part = features[first : first + row.rows]
            first += row.rows
            request = self._requests.get(row.key)
            if request is None:
                continue
            context = request.context
            if row.anchor_token_id is not None:
                context.truncate(len(row.tokens) - 1)
            context.append(row.position, part)
            if self._prefix is not None:
                self._prefix.record(request.prefix, row.tokens, row.position, part)
            if self._offers is not None and request.handoff is not None and row.anchor_token_id is not None:
                self._offers.put(request.handoff, context.low, context.rows_from(context.low))
                request.handoff = None
        self._take_handoffs()

    def _take_handoffs(self) -> None:
        """Put prompt features that have arrived in front of their requests', however late."""
        if self._fetcher is None or not self._expected:
            return
        for handoff, position, rows in self._fetcher.arrived():
            key = self._expected.pop(handoff, None)
            if key is None or key not in self._requests:
                continue
            self._requests[key].handoff = None
            if len(rows) and self._requests[key].context.prepend(position, rows):
                self._stats.handoffs_received += 1
            else:
                self._stats.handoffs_missed += 1
