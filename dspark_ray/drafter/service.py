"""The drafter as a service: a ZeroMQ socket around a `DraftRunner`. Without Ray; an actor or a test runs it.

Calls that arrive together run as one batch, one call of each verifier, so that no verifier waits behind
another's backlog. The queue is bounded and says `busy` at once. A call that a newer one of the same verifier
has overtaken only feeds its context: nobody waits for its drafts any more.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import zmq

from dspark_ray.drafter.runner import DraftItem, DraftResult, DraftRunner
from dspark_ray.drafter.wire import Frames, check_bind, decode_call, decode_features, encode, secure
from dspark_ray.errors import ProtocolError
from dspark_ray.protocol import PROTOCOL_VERSION, DraftAnswer, DraftProposal, DraftRequest, Refusal

logger = logging.getLogger(__name__)
_POLL_MS = 200


@dataclass
class ServiceCounters:
    """Since the start; read by telemetry from another thread."""

    calls: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    overtaken: int = 0
    """Calls answered without drafts because a newer one of the same verifier had arrived."""
    late: int = 0
    """Calls whose answer came when their verifier had gone on without it; the overtaken ones are among them."""
    batches: int = 0
    tokens_drafted: int = 0
    missing_context: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    slots_expired: int = 0
    compute_ms: float = 0.0
    """Running mean of a batch."""
    queued: int = 0
    """Calls waiting now."""


@dataclass
class _Verifier:
    seen_s: float
    keys: set[str] = field(default_factory=set)


@dataclass
class _Call:
    peer: bytes
    request: DraftRequest
    items: list[DraftItem]
    overtaken: bool = False
    finished: set[str] = field(default_factory=set)
    """Its requests that ended while it waited: running it gives them slots that nobody will free."""


class DrafterService:
    """Serves draft calls until it is stopped.

    Args:
        runner: does the drafting; used by this thread only.
        fingerprint: of target and drafter; calls with another are refused.
        width: d, numbers in a feature row.
        max_batch: entries the runner takes in one call.
        secret: the deployment's; None leaves the socket open.
        bind: endpoint to bind, port * for a free one.
        batch_wait_s: how long to wait for other verifiers once a call is there.
        max_queued_calls: more are answered `busy`.
        slot_lifetime_s: a verifier silent for longer has its slots freed.
        clock: monotonic seconds.

    Raises:
        ConfigError: `bind` is open to the network and there is no secret.
    """

    def __init__(
        self,
        runner: DraftRunner,
        *,
        fingerprint: str,
        width: int,
        max_batch: int,
        secret: str | None = None,
        bind: str = "tcp://127.0.0.1:*",
        batch_wait_s: float = 0.0,
        max_queued_calls: int = 64,
        slot_lifetime_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        check_bind(bind, secret)
        self._runner = runner
        self._fingerprint = fingerprint
        self._width = width
        self._max_batch = max_batch
        self._batch_wait_s = batch_wait_s
        self._max_queued = max_queued_calls
        self._slot_lifetime_s = slot_lifetime_s
        self._clock = clock
        self._verifiers: dict[str, _Verifier] = {}
        self._queue: deque[_Call] = deque()
        self._stopped = threading.Event()
        self.counters = ServiceCounters()
        self.came_round_s = clock()
        """When the loop last came round, on `clock`; a watcher sees from it that the loop hangs."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        secure(self._socket, secret, server=True)
        self._socket.bind(bind)
        self.endpoint: str = self._socket.last_endpoint.decode()
        """Where the socket listens."""

    def stop(self) -> None:
        """Ask `run` to return; safe from any thread."""
        self._stopped.set()

    def run(self) -> None:
        """Serve until `stop`. Nothing a peer sends ends it."""
        try:
            while not self._stopped.is_set():
                self.serve_once(_POLL_MS)
        finally:
            self._socket.close()
            self._context.term()

    def serve_once(self, timeout_ms: int) -> None:
        """Wait for calls at most that long, then run one batch."""
        self.came_round_s = self._clock()
        if self._socket.poll(timeout_ms if not self._queue else 0):
            self._receive_all()
            others_may_come = self._batch_wait_s > 0 and len(self._queue) < len(self._verifiers)
            if others_may_come and self._socket.poll(max(1, round(self._batch_wait_s * 1e3))):
                self._receive_all()
        self._expire()
        if batch := self._next_batch():
            self._run_batch(batch)
        self.counters.queued = len(self._queue)

    def _receive_all(self) -> None:
        while True:
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.counters.bytes_in += sum(map(len, frames))
            self._admit(peer, frames)

    def _admit(self, peer: bytes, frames: Frames) -> None:
        """Queue a call, or refuse it."""
        try:
            request, features = decode_call(frames)
        except ProtocolError as error:
            self._refuse(peer, 0, "malformed", str(error))
            return
        if request.version != PROTOCOL_VERSION:
            detail = f"this drafter speaks version {PROTOCOL_VERSION}, the call is version {request.version}"
            self._refuse(peer, request.epoch, "version", detail)
            return
        if request.fingerprint != self._fingerprint:
            detail = (
                f"its target or drafter has other weights ({self._fingerprint[:8]}) than this verifier's "
                f"({request.fingerprint[:8]}): no drafts until both have the same"
            )
            self._refuse(peer, request.epoch, "fingerprint", detail)
            return
        verifier = self._verifiers.setdefault(request.verifier, _Verifier(self._clock()))
        verifier.seen_s = self._clock()
        self._free(request.verifier, request.finished)
        own = [waiting for waiting in self._queue if waiting.request.verifier == request.verifier]
        for waiting in own:
            waiting.finished.update(request.finished)
        if not request.entries:
            return  # only news of finished requests: nobody waits for a reply
        if len(self._queue) >= self._max_queued:
            self._refuse(peer, request.epoch, "busy", f"{len(self._queue)} calls are waiting")
            return
        try:
            items = self._items(request, features)
        except ProtocolError as error:
            self._refuse(peer, request.epoch, "malformed", str(error))
            return
        for waiting in own:
            waiting.overtaken = True
        self.counters.calls += 1
        self._queue.append(_Call(peer, request, items))

    def _items(self, request: DraftRequest, frame: bytes) -> list[DraftItem]:
        if request.width != self._width:
            raise ProtocolError(f"features are {request.width} wide, this drafter takes {self._width}")
        if len(request.entries) > self._max_batch:
            raise ProtocolError(f"{len(request.entries)} entries, at most {self._max_batch} are served")
        total = sum(entry.rows for entry in request.entries)
        parts = decode_features(frame, total, request.width).split([e.rows for e in request.entries])
        items = [
            DraftItem(
                key=f"{request.verifier}/{entry.key}",
                base_position=entry.base_position,
                features=rows,
                anchor_token_id=entry.anchor_token_id,
                draft_len=entry.draft_len,
                fresh=entry.fresh,
            )
            for entry, rows in zip(request.entries, parts, strict=True)
        ]
        if len({item.key for item in items}) != len(items):
            raise ProtocolError("one key twice in a call")
        for item in items:
            self._runner.check_item(item)
        return items

    def _next_batch(self) -> list[_Call]:
        """The oldest call of each verifier, as many as fit."""
        batch: list[_Call] = []
        rest: deque[_Call] = deque()
        taken: set[str] = set()
        room = self._max_batch
        for call in self._queue:
            if call.request.verifier not in taken and len(call.items) <= room:
                batch.append(call)
                room -= len(call.items)
            else:
                rest.append(call)
            taken.add(call.request.verifier)  # also when it did not fit: its later calls must not pass it
        self._queue = rest
        return batch

    def _run_batch(self, batch: list[_Call]) -> None:
        items: list[DraftItem] = []
        for call in batch:
            self.counters.overtaken += call.overtaken
            self._verifiers.setdefault(call.request.verifier, _Verifier(self._clock())).keys.update(
                entry.key for entry in call.request.entries
            )
            items += [_feed_only(item) if call.overtaken else item for item in call.items]
        started = time.perf_counter()
        result = self._runner.draft(items)
        for call in batch:
            self._free(call.request.verifier, call.finished)
        answers = answers_of(result)
        compute_ms = (time.perf_counter() - started) * 1e3
        self._receive_all()  # who asks anew already has not waited for these answers
        gone_on = {call.request.verifier for call in self._queue}
        counters = self.counters
        counters.late += sum(call.overtaken or call.request.verifier in gone_on for call in batch)
        counters.batches += 1
        counters.compute_ms += (compute_ms - counters.compute_ms) / min(counters.batches, 100)
        counters.tokens_drafted += sum(len(answer.draft_token_ids) for answer in answers)
        counters.missing_context += sum(answer.missing_from is not None for answer in answers)
        first = 0
        for call in batch:
            own = answers[first : first + len(call.items)]
            first += len(call.items)
            self._send(call.peer, encode(DraftProposal(call.request.epoch, own, compute_ms)))

    def _refuse(self, peer: bytes, epoch: int, reason: str, detail: str) -> None:
        self.counters.refused[reason] = self.counters.refused.get(reason, 0) + 1
        self._send(peer, encode(Refusal(epoch, reason, detail)))  # type: ignore[arg-type]

    def _send(self, peer: bytes, frames: Frames) -> None:
        self.counters.bytes_out += sum(map(len, frames))
        self._socket.send_multipart([peer, *frames])  # a ROUTER drops what nobody takes; it never blocks

    def _free(self, verifier: str, keys: Collection[str]) -> None:
        self._runner.free(f"{verifier}/{key}" for key in keys)
        self._verifiers[verifier].keys.difference_update(keys)

    def _expire(self) -> None:
        """Free the slots of verifiers that have gone silent."""
        oldest = self._clock() - self._slot_lifetime_s
        for name in [name for name, verifier in self._verifiers.items() if verifier.seen_s < oldest]:
            gone = self._verifiers[name]
            self.counters.slots_expired += len(gone.keys)
            self._free(name, list(gone.keys))
            del self._verifiers[name]


def answers_of(result: DraftResult) -> list[DraftAnswer]:
    """A runner's result as answers: rows cut where nothing was drafted."""
    tokens, logits = result.draft_token_ids.tolist(), result.confidence_logits.tolist()
    lengths = (result.draft_token_ids >= 0).sum(dim=1).tolist()
    return [
        DraftAnswer(row[:length], scores[:length], missing)
        for row, scores, length, missing in zip(tokens, logits, lengths, result.missing_from, strict=True)
    ]


def _feed_only(item: DraftItem) -> DraftItem:
    return DraftItem(
        item.key, item.base_position, item.features, item.anchor_token_id, draft_len=0, fresh=item.fresh
    )
