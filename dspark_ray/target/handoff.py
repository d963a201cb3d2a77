"""Prompt features from the prefill worker to the verifier's: kept there for a while, fetched once.

KV blocks travel by vLLM's connector, after which the verifier computes only the last prompt position itself.
The features of the others come through here, under an id that the server puts into both engines' extra_args.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq
from torch import Tensor

from dspark_ray.drafter.wire import (
    check_bind,
    decode_features,
    decode_fetch,
    decode_run,
    encode,
    encode_features,
    secure,
)
from dspark_ray.errors import ProtocolError
from dspark_ray.protocol import PROTOCOL_VERSION, FeatureRun, FetchFeatures, Refusal

logger = logging.getLogger(__name__)
HANDOFF_KEY = "dspark_handoff"
HANDOFF_ENDPOINT_KEY = "dspark_handoff_endpoint"
_POLL_MS = 200
_LINKS_HELD = 64


@dataclass(frozen=True)
class _Offer:
    base_position: int
    rows: int
    frame: bytes
    expires_at: float


class HandoffStore:
    """Feature rows of prompts, bounded in bytes and in time. Thread-safe."""

    def __init__(self, capacity_bytes: int, lifetime_s: float, clock: Callable[[], float] = time.monotonic):
        self._capacity = capacity_bytes
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._offers: OrderedDict[str, _Offer] = OrderedDict()  # oldest first, so expired ones are in front
        self._bytes = 0
        self._lock = threading.Lock()
        self.offered = self.fetched = self.expired = 0

    def __len__(self) -> int:
        return len(self._offers)

    def put(self, handoff: str, base_position: int, rows: Tensor) -> None:
        """Keep rows [n, d] of positions from base_position on; the oldest make room."""
        frame = encode_features([rows])
        with self._lock:
            self._drop(handoff)
            self._offers[handoff] = _Offer(base_position, len(rows), frame, self._clock() + self._lifetime_s)
            self._bytes += len(frame)
            self.offered += 1
            self._trim()

    def take(self, handoff: str) -> _Offer | None:
        """Hand out an offer; the second time there is nothing."""
        with self._lock:
            self._trim()
            offer = self._drop(handoff)
            self.fetched += offer is not None
            return offer

    def trim(self) -> None:
        """Forget what has waited for too long."""
        with self._lock:
            self._trim()

    def _trim(self) -> None:
        now = self._clock()
        while self._offers:
            name, oldest = next(iter(self._offers.items()))
            if oldest.expires_at > now and self._bytes <= self._capacity:
                return
            self._drop(name)
            self.expired += 1

    def _drop(self, handoff: str) -> _Offer | None:
        offer = self._offers.pop(handoff, None)
        self._bytes -= len(offer.frame) if offer else 0
        return offer


class HandoffServer:
    """Answers fetches from a background thread of the prefill worker.

    Raises:
        ConfigError: `bind` is open to the network and there is no secret.
    """

    def __init__(self, store: HandoffStore, *, bind: str, fingerprint: str, width: int, secret: str | None):
        check_bind(bind, secret)
        self._store = store
        self._fingerprint = fingerprint
        self._width = width
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        secure(self._socket, secret, server=True)
        self._socket.bind(bind)
        self.endpoint: str = self._socket.last_endpoint.decode()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="dspark-handoff", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._stopped.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._stopped.is_set():
            if not self._socket.poll(_POLL_MS):
                self._store.trim()
                continue
            peer, *frames = self._socket.recv_multipart()
            self._socket.send_multipart([peer, *self._answer(frames)])
        self._socket.close()
        self._context.term()

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        try:
            fetch = decode_fetch(frames)
        except ProtocolError as error:
            return encode(Refusal(0, "malformed", str(error)))
        if fetch.version != PROTOCOL_VERSION:
            return encode(Refusal(0, "version", f"this worker speaks version {PROTOCOL_VERSION}"))
        if fetch.fingerprint != self._fingerprint:
            return encode(Refusal(0, "fingerprint", "another target or drafter is served here"))
        offer = self._store.take(fetch.handoff)
        if offer is None:
            return encode(FeatureRun(fetch.handoff, 0, 0, self._width))
        return encode(FeatureRun(fetch.handoff, offer.base_position, offer.rows, self._width), offer.frame)


class HandoffFetcher:
    """Asks prefill workers for prompt features and picks up what has arrived, without ever waiting."""

    def __init__(self, *, fingerprint: str, width: int, secret: str | None):
        self._fingerprint = fingerprint
        self._width = width
        self._secret = secret
        self._context = zmq.Context()
        self._links: OrderedDict[str, zmq.Socket[Any]] = OrderedDict()

    def ask(self, endpoint: str, handoff: str) -> None:
        """Send a fetch; the answer, if any, comes out of `arrived` later."""
        try:
            self._link(endpoint).send_multipart(
                encode(FetchFeatures(PROTOCOL_VERSION, handoff, self._fingerprint)), zmq.NOBLOCK
            )
        except zmq.ZMQError as error:
            logger.warning("prompt features at %s cannot be asked for: %s", endpoint, error)

    def arrived(self) -> list[tuple[str, int, Tensor]]:
        """(hand-off id, position of the first row, rows [n, d]) of every answer since the last call."""
        found = []
        for endpoint, link in self._links.items():
            while True:
                try:
                    frames = link.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                try:
                    run, frame = decode_run(frames)
                    if isinstance(run, Refusal):
                        raise ProtocolError(f"refused: {run.reason}: {run.detail}")
                    if run.width != self._width:
                        raise ProtocolError(f"rows of {run.width} numbers, {self._width} expected")
                    found.append(
                        (run.handoff, run.base_position, decode_features(frame, run.rows, run.width))
                    )
                except ProtocolError as error:
                    logger.warning("prompt features from %s dropped: %s", endpoint, error)
        return found

    def close(self) -> None:
        """Close all connections."""
        for link in self._links.values():
            link.close()
        self._context.term()

    def _link(self, endpoint: str) -> "zmq.Socket[Any]":
        if endpoint not in self._links:
            while len(self._links) >= _LINKS_HELD:
                self._links.popitem(last=False)[1].close()
            link = self._context.socket(zmq.DEALER)
            link.linger = 0
            link.sndhwm = 256
            secure(link, self._secret, server=False)
            link.connect(endpoint)
            self._links[endpoint] = link
        self._links.move_to_end(endpoint)
        return self._links[endpoint]
