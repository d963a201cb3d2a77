"""A pool of drafters on ZeroMQ, as one verifier's worker sees it.

Every request is assigned to one drafter and stays there; a step sends one call to each drafter in use, then
waits for all of them until one deadline. What is late is discarded: the step goes on without those drafts.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from dspark_ray.drafter.wire import check_proposal, decode_reply, encode, encode_features, secure
from dspark_ray.errors import ProtocolError
from dspark_ray.protocol import PROTOCOL_VERSION, DraftAnswer, DraftEntry, DrafterRoute, DraftRequest, Refusal
from dspark_ray.target.deadline import Deadline
from dspark_ray.target.drafter_client import ClientCounters, DraftQuestion

logger = logging.getLogger(__name__)
_MISSES_UNTIL_DOWN = 3
_BAD_UNTIL_DOWN = 3
_RETRY_S = 0.25
_FAREWELL_MS = 200
_FINISHED_HELD = 4096
_BACK_OFF_REASONS = frozenset({"fingerprint", "version", "malformed"})


@dataclass
class _Link:
    """The connection to one drafter."""

    route: DrafterRoute
    socket: "zmq.Socket[Any]"
    deadline: Deadline
    keys: set[str] = field(default_factory=set)
    """Requests assigned to it."""
    finished: list[str] = field(default_factory=list)
    """Keys it has not been told about yet."""
    sent_at: dict[int, float] = field(default_factory=dict)
    """Epoch of each call without a reply yet, and when it was sent."""
    misses: int = 0
    bad: int = 0
    """Replies in a row that could not be used."""
    retry_at: float = 0.0
    """Not used before that time, unless there is no other."""
    trouble: str = ""
    """Why it was last left alone; said once."""

    def give_up(self, key: str) -> None:
        """A request leaves it, which it hears with the next call: it does not expire slots of who still calls."""
        self.keys.discard(key)
        self.finished.append(key)
        del self.finished[:-_FINISHED_HELD]


class RemoteDrafters:
    """Draft calls to a pool.

    Args:
        verifier: unique for each start of a worker.
        fingerprint: of target and drafter.
        width: d.
        vocab_size: of the target.
        secret: the deployment's; None leaves connections open.
        deadline_ms: fixed deadline; a running estimate when None.
        drafters: pool to begin with.
    """

    def __init__(
        self,
        *,
        verifier: str,
        fingerprint: str,
        width: int,
        vocab_size: int,
        secret: str | None,
        deadline_ms: float | None,
        drafters: Sequence[DrafterRoute] = (),
    ):
        self._verifier = verifier
        self._fingerprint = fingerprint
        self._width = width
        self._vocab_size = vocab_size
        self._secret = secret
        self._deadline_ms = deadline_ms
        self._context = zmq.Context()
        self._links: dict[str, _Link] = {}
        self._owner: dict[str, str] = {}  # request key -> drafter
        self._epoch = 0
        self._forgotten: set[str] = set()
        self.counters = ClientCounters()
        self.route(drafters)

    def route(self, drafters: Sequence[DrafterRoute]) -> None:
        """Follow the pool: new drafters are connected to, the requests of gone ones move."""
        wanted = {route.replica: route for route in drafters}
        for name in [n for n, link in self._links.items() if n not in wanted]:
            self._close(self._links.pop(name))
        for name, route in wanted.items():
            link = self._links.get(name)
            if link is not None and link.route.endpoint == route.endpoint:
                link.route = route
                continue
            if link is not None:  # restarted elsewhere
                self._close(link)
            self._links[name] = _Link(route, self._connect(route.endpoint), Deadline(self._deadline_ms))

    def draft(self, questions: Sequence[DraftQuestion], finished: Sequence[str]) -> list[DraftAnswer | None]:
        """One call to each drafter in use, in parallel; see `DrafterClient.draft`."""
        for key in finished:
            self._release(key)
        self._epoch += 1
        answers: list[DraftAnswer | None] = [None] * len(questions)
        waiting: dict[str, list[int]] = {}
        by_drafter: dict[str, list[int]] = {}
        for index, question in enumerate(questions):
            if (name := self._assign(question.key)) is not None:
                by_drafter.setdefault(name, []).append(index)
        for name, link in self._links.items():
            indices = by_drafter.get(name, [])
            if (indices or link.finished) and self._send(link, [questions[i] for i in indices]) and indices:
                waiting[name] = indices
        if questions:
            self.counters.calls += 1
            self.counters.unavailable += not waiting
            self._collect(questions, waiting, answers)
        return answers

    def forgotten(self) -> set[str]:
        """Keys that have moved to another drafter."""
        moved, self._forgotten = self._forgotten, set()
        return moved

    def close(self) -> None:
        """Close all connections."""
        for link in self._links.values():
            link.socket.close()
        self._context.term()

    def _connect(self, endpoint: str) -> "zmq.Socket[Any]":
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.immediate = True  # a call to a drafter that is not there fails at once
        socket.sndhwm = 64
        socket.reconnect_ivl, socket.reconnect_ivl_max = 20, 500
        secure(socket, self._secret, server=False)
        socket.connect(endpoint)
        return socket

    def _assign(self, key: str) -> str | None:
        """The drafter of a request: where it is, unless that one is down and another is not."""
        now = time.monotonic()
        name = self._owner.get(key)
        usable = [n for n, link in self._links.items() if link.retry_at <= now]
        if name is not None and (name in usable or not usable):
            return name if name in usable else None
        if not usable:
            return None
        if name is not None:
            self._links[name].give_up(key)
            self._forgotten.add(key)
        name = min(
            usable, key=lambda n: (len(self._links[n].keys) + 1) / max(self._links[n].route.weight, 1e-3)
        )
        self._owner[key] = name
        self._links[name].keys.add(key)
        return name

    def _release(self, key: str) -> None:
        self._forgotten.discard(key)
        if (name := self._owner.pop(key, None)) is not None and name in self._links:
            self._links[name].give_up(key)

    def _abandon(self, link: _Link) -> None:
        """Take all requests away from a drafter."""
        self._forgotten |= link.keys
        for key in link.keys:
            self._owner.pop(key, None)
        link.keys.clear()

    def _close(self, link: _Link) -> None:
        """Part with a drafter. One that still listens hears that it may free what it holds for this verifier."""
        link.finished += link.keys
        self._abandon(link)
        if link.finished:
            self._send(link, [])
        link.socket.close(_FAREWELL_MS)

    def _send(self, link: _Link, questions: Sequence[DraftQuestion]) -> bool:
        """Send one call; false when the drafter is not there."""
        request = DraftRequest(
            version=PROTOCOL_VERSION,
            verifier=self._verifier,
            epoch=self._epoch,
            fingerprint=self._fingerprint,
            width=self._width,
            dtype="bf16",
            entries=[
                DraftEntry(q.key, q.base_position, len(q.features), q.anchor_token_id, q.draft_len, q.fresh)
                for q in questions
            ],
            finished=link.finished,
        )
        frames = encode(request, encode_features([q.features for q in questions]))
        try:
            link.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._down(link, "is not connected")
            return False
        link.finished = []
        if questions:
            link.sent_at[self._epoch] = time.monotonic()
        self.counters.bytes_sent += sum(map(len, frames))
        return True

    def _collect(
        self,
        questions: Sequence[DraftQuestion],
        waiting: dict[str, list[int]],
        answers: list[DraftAnswer | None],
    ) -> None:
        """Read replies until all are there or the deadline has passed."""
        started = time.monotonic()
        budget_s = max((self._links[name].deadline.seconds for name in waiting), default=0.0)
        poller = zmq.Poller()
        for name in waiting:
            poller.register(self._links[name].socket, zmq.POLLIN)
        compute_ms = 0.0
        while waiting and (left := started + budget_s - time.monotonic()) > 0:
            # poll takes whole milliseconds; one more costs nothing, since a reply ends it
            ready = dict(poller.poll(int(left * 1e3) + 1))
            for name in [n for n in waiting if self._links[n].socket in ready]:
                link = self._links[name]
                indices = waiting[name]
                outcome = self._receive(link, [questions[i].draft_len for i in indices])
                if outcome is None:
                    continue
                proposed, spent_ms = outcome
                compute_ms = max(compute_ms, spent_ms)
                for index, answer in zip(indices, proposed, strict=False):
                    answers[index] = answer
                poller.unregister(link.socket)
                del waiting[name]
        for name in waiting:
            self._missed(self._links[name])
        waited_ms = (time.monotonic() - started) * 1e3
        self.counters.draft_ms += compute_ms
        self.counters.transport_ms += max(0.0, waited_ms - compute_ms)

    def _receive(self, link: _Link, draft_lens: list[int]) -> tuple[list[DraftAnswer], float] | None:
        """One message: the answers and the drafter's time, nothing if refused, None if it was a stale one."""
        frames = link.socket.recv_multipart()
        self.counters.bytes_received += sum(map(len, frames))
        try:
            reply = decode_reply(frames)
            sent_at = link.sent_at.pop(reply.epoch, None)
            if isinstance(reply, Refusal):
                self.counters.refused += 1
                self.counters.mismatched += reply.reason in {"fingerprint", "version"}
                if reply.reason in _BACK_OFF_REASONS:
                    self._down(link, f"refuses: {reply.reason}: {reply.detail}")
                return ([], 0.0) if reply.epoch in (self._epoch, 0) else None
            if sent_at is not None:
                took_s = time.monotonic() - sent_at
                if reply.epoch != self._epoch:
                    # It lay here until this call; when it came is not known, but it was late.
                    took_s = min(took_s, max(2 * link.deadline.seconds, reply.compute_ms / 1e3))
                link.deadline.observe(took_s)
                link.misses, link.retry_at, link.trouble = 0, 0.0, ""
            if reply.epoch != self._epoch:
                self.counters.bad_replies += 1
                return None
            check_proposal(reply, draft_lens, self._vocab_size)
            link.bad = 0
        except ProtocolError as error:
            self.counters.bad_replies += 1
            link.bad += 1
            if link.bad >= _BAD_UNTIL_DOWN:
                self._down(link, f"has sent {link.bad} replies in a row that cannot be used")
            logger.warning("drafter %s: %s; reply dropped", link.route.replica, error)
            return [], 0.0
        return reply.answers, reply.compute_ms

    def _missed(self, link: _Link) -> None:
        self.counters.deadline_misses += 1
        link.misses += 1
        for epoch in sorted(link.sent_at)[:-8]:
            del link.sent_at[epoch]
        if link.misses >= _MISSES_UNTIL_DOWN:
            self._down(link, f"missed {_MISSES_UNTIL_DOWN} deadlines in a row")

    def _down(self, link: _Link, why: str) -> None:
        """Leave a drafter alone for a moment; its requests move where there is another."""
        if why != link.trouble:
            logger.warning("drafter %s at %s %s", link.route.replica, link.route.endpoint, why)
        link.trouble = why
        link.retry_at = time.monotonic() + _RETRY_S
