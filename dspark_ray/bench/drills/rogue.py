"""A drafter that misbehaves: a proxy in front of a real one, which joins the pool by its telemetry.

Verifiers find it as they find every drafter: the cluster scheduler reads its samples and names it in the routes.
It reports that it is idle, so most new requests go to it. What it passes on, it spoils.
"""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from dspark_ray.control.telemetry import TelemetryStore
from dspark_ray.drafter.wire import Frames, decode_call, decode_reply, encode
from dspark_ray.protocol import MAX_FRAME_BYTES, DraftAnswer, DraftProposal, DraftRequest, LoadSample

SAMPLE_INTERVAL_S = 0.2
SURE = 20.0
"""Logit of a confidence of 1."""


@dataclass
class Spoiler:
    """Turns replies of a real drafter into what is sent instead.

    Args:
        spoil: given a reply's frames, what to send: nothing, one or several replies, each after a delay.
        vocab_size: of the target.
    """

    spoil: Callable[["Spoiler", Frames], list[tuple[float, Frames]]]
    vocab_size: int
    rng: random.Random = field(default_factory=lambda: random.Random(1))  # noqa: S311
    last: Frames | None = None


@dataclass
class _Back:
    """The connection to the real drafter that stands for one verifier, and what that drafter holds for it."""

    socket: "zmq.Socket[Any]"
    last: DraftRequest | None = None
    keys: set[str] = field(default_factory=set)


class RogueDrafter:
    """The proxy, in a thread. Connections on both sides are open ones.

    Args:
        behind: endpoint of a real drafter.
        spoiler: what becomes of its replies.
    """

    def __init__(self, behind: str, spoiler: Spoiler):
        self._behind = behind
        self._spoiler = spoiler
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.linger = 0
        self._front.bind("tcp://127.0.0.1:*")
        self.endpoint: str = self._front.last_endpoint.decode()
        self._backs: dict[bytes, _Back] = {}
        self._due: list[tuple[float, bytes, Frames]] = []
        self._stopped = threading.Event()
        self.calls = 0
        """Draft calls that reached it."""
        self._threads = [threading.Thread(target=self._relay)]
        self._threads[0].start()

    def join_pool(self, store: TelemetryStore, model: str) -> None:
        """Report as an idle drafter of the model until stopped."""
        sample = LoadSample(
            role="drafter", model=model, replica="rogue", sequence=0, deployment=f"Drafter:{model}",
            slots_total=1024, endpoint=self.endpoint,
        )  # fmt: skip

        def report() -> None:
            sequence = 0
            while not self._stopped.wait(SAMPLE_INTERVAL_S):
                sequence += 1
                store.push(msgspec.structs.replace(sample, sequence=sequence, draft_calls=self.calls))

        self._threads.append(threading.Thread(target=report))
        self._threads[1].start()

    def stop(self) -> None:
        """Leave."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _relay(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._stopped.is_set():
            ready = dict(poller.poll(2 if self._due else 100))
            if self._front in ready:
                peer, *frames = self._front.recv_multipart()
                self._pass_on(peer, frames, poller)
            for peer, back in self._backs.items():
                if back.socket in ready:
                    now = time.monotonic()
                    for delay_s, reply in self._spoiler.spoil(self._spoiler, back.socket.recv_multipart()):
                        self._due.append((now + delay_s, peer, reply))
            now = time.monotonic()
            for _, peer, reply in [item for item in self._due if item[0] <= now]:
                self._front.send_multipart([peer, *reply])
            self._due = [item for item in self._due if item[0] > now]
        self._leave()

    def _pass_on(self, peer: bytes, frames: Frames, poller: zmq.Poller) -> None:
        self.calls += 1
        if peer not in self._backs:
            socket = self._context.socket(zmq.DEALER)
            socket.connect(self._behind)
            poller.register(socket, zmq.POLLIN)
            self._backs[peer] = _Back(socket)
        back = self._backs[peer]
        call, features = decode_call(frames)
        # Under another name: the same verifier may also talk to that drafter without us.
        back.last = msgspec.structs.replace(call, verifier=f"{call.verifier}/rogue")
        back.keys |= {entry.key for entry in call.entries}
        back.keys -= set(call.finished)
        back.socket.send_multipart(encode(back.last, features))

    def _leave(self) -> None:
        """Free what the real drafter holds for our sake, and close."""
        for back in self._backs.values():
            if back.last is not None:
                last = msgspec.structs.replace(back.last, entries=[], finished=sorted(back.keys))
                back.socket.send_multipart(encode(last))
        self._context.destroy(linger=1000)


# --- what becomes of a reply


def _now(*frames: bytes) -> list[tuple[float, Frames]]:
    return [(0.0, list(frames))]


def _each_answer(change: Callable[[Spoiler, DraftAnswer], DraftAnswer]) -> Callable[..., Any]:
    """A spoiler that changes the answers of a well-formed proposal."""

    def spoil(self: Spoiler, frames: Frames) -> list[tuple[float, Frames]]:
        reply = decode_reply(frames)
        if not isinstance(reply, DraftProposal):
            return [(0.0, frames)]
        answers = [change(self, answer) for answer in reply.answers]
        return [(0.0, encode(msgspec.structs.replace(reply, answers=answers)))]

    return spoil


def _corrupted(self: Spoiler, frames: Frames) -> list[tuple[float, Frames]]:
    head = bytearray(frames[0])
    for _ in range(1 + len(head) // 8):
        head[self.rng.randrange(len(head))] = self.rng.randrange(256)
    return _now(bytes(head[: self.rng.randrange(1, len(head) + 1)]), frames[1])


def _stale(self: Spoiler, frames: Frames) -> list[tuple[float, Frames]]:
    """Each reply is the one to the call before, twice."""
    last, self.last = self.last, frames
    return [] if last is None else [(0.0, last), (0.0, last)]


def _oversized(self: Spoiler, frames: Frames) -> list[tuple[float, Frames]]:
    if self.rng.random() < 0.1:
        return _now(frames[0], bytes(MAX_FRAME_BYTES))
    return _now(frames[0], *[b"x" * 4096] * 50)


def _misshapen(self: Spoiler, frames: Frames) -> list[tuple[float, Frames]]:
    reply = decode_reply(frames)
    if not isinstance(reply, DraftProposal):
        return [(0.0, frames)]
    answers = list(reply.answers)
    match self.rng.randrange(4):
        case 0:
            answers.pop()
        case 1:
            answers.append(DraftAnswer([1, 2], [SURE, SURE]))
        case 2:
            answers[0] = DraftAnswer([5] * 40, [SURE] * 40)
        case _:
            answers[0] = DraftAnswer([5] * 3, [SURE] * 2)
    return [(0.0, encode(msgspec.structs.replace(reply, answers=answers)))]


def _random_tokens(self: Spoiler, answer: DraftAnswer) -> DraftAnswer:
    count = len(answer.draft_token_ids)
    return DraftAnswer(
        [self.rng.randrange(self.vocab_size) for _ in range(count)], [SURE] * count, answer.missing_from
    )


def _undefined(self: Spoiler, answer: DraftAnswer) -> DraftAnswer:
    values = [float("nan"), float("inf"), -float("inf")]
    logits = [self.rng.choice(values) for _ in answer.draft_token_ids]
    return DraftAnswer(answer.draft_token_ids, logits, answer.missing_from)


def _strange_tokens(self: Spoiler, answer: DraftAnswer) -> DraftAnswer:
    return DraftAnswer(
        [self.vocab_size + 7 for _ in answer.draft_token_ids], answer.confidence_logits, answer.missing_from
    )


def _amnesia(_: Spoiler, __: DraftAnswer) -> DraftAnswer:
    """Says each time that it lacks all context."""
    return DraftAnswer([], [], 0)


def _slow(self: Spoiler, frames: Frames) -> list[tuple[float, Frames]]:
    """A network that delays replies by up to a second and reorders them."""
    return [(self.rng.expovariate(1 / 0.15), frames)]


def _lossy(self: Spoiler, frames: Frames) -> list[tuple[float, Frames]]:
    """A network that loses a third of the replies and doubles another."""
    return [(0.0, frames)] * self.rng.choice((0, 1, 2))


SPOILERS: dict[str, Callable[[Spoiler, Frames], list[tuple[float, Frames]]]] = {
    "corrupted": _corrupted,
    "stale": _stale,
    "oversized": _oversized,
    "misshapen": _misshapen,
    "random tokens": _each_answer(_random_tokens),
    "NaN confidences": _each_answer(_undefined),
    "ids outside the vocabulary": _each_answer(_strange_tokens),
    "amnesia": _each_answer(_amnesia),
    "delayed": _slow,
    "lost": _lossy,
}
