"""Steady traffic of requests whose answers are known, as clients send and see it."""

import asyncio
import json
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx

from dspark_ray.bench.drills.deployment import MODEL
from dspark_ray.bench.prompts import load_prompts

PROMPTS = Path(__file__).resolve().parents[3] / "tests" / "data" / "eval_slice.jsonl"
LONGEST_PROMPT_CHARACTERS = 300
HUNG_AFTER_S = 75.0
"""A client that has heard nothing for so long is told nothing any more."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Case:
    """One request and its answer."""

    path: str
    body: dict[str, Any]
    text: str = ""
    """What it must say; of a deployment without faults."""


@dataclass(frozen=True)
class Outcome:
    """What became of one request."""

    streamed: bool
    started_s: float
    ended_s: float
    verdict: Literal["ok", "wrong", "failed", "hung", "cut"]
    """cut: the stream ended without an end and without an error, which must never be."""
    detail: str = ""

    @property
    def seconds(self) -> float:
        """How long its client waited."""
        return self.ended_s - self.started_s


@dataclass
class Reading:
    """An answer as far as it came."""

    text: str = ""
    status: int = 0
    error: str | None = None
    done: bool = False
    finish_reasons: list[str] = field(default_factory=list)


def cases(count: int) -> list[Case]:
    """Requests of several kinds, prompts and lengths; every third is sampled with a seed."""
    short = [prompt for prompt in load_prompts(str(PROMPTS)) if len(prompt) <= LONGEST_PROMPT_CHARACTERS]
    made = []
    for number, prompt in enumerate(short[:: max(1, len(short) // count)][:count]):
        body: dict[str, Any] = {"model": MODEL, "max_tokens": (8, 16, 32)[number % 3], "temperature": 0}
        if number % 3 == 2:
            body |= {"temperature": 0.9, "seed": 100 + number}
        if number % 2:
            made.append(Case("/v1/completions", body | {"prompt": prompt, "ignore_eos": True}))
        else:
            made.append(
                Case("/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]})
            )
    return made


async def read(client: httpx.AsyncClient, case: Case, *, stream: bool, into: Reading) -> None:
    """Send a request and read its answer, whole or as a stream, into ``into``."""
    body = case.body | {"stream": stream}
    async with client.stream("POST", case.path, json=body) as response:
        into.status = response.status_code
        if response.status_code != 200 or not stream:
            _read_whole(json.loads(await response.aread()), into)
            return
        async for line in response.aiter_lines():
            read_event(line, into)


def read_event(line: str, into: Reading) -> None:
    """Take in one line of a stream."""
    data = line.removeprefix("data: ")
    if not line.startswith("data: "):
        return
    if data == "[DONE]":
        into.done = True
        return
    document = json.loads(data)
    if "error" in document:
        into.error = f"event {document['error'].get('code')}"
        return
    for choice in document["choices"]:
        into.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        if choice.get("finish_reason"):
            into.finish_reasons.append(choice["finish_reason"])


def _read_whole(document: dict[str, Any], into: Reading) -> None:
    into.done = True
    if into.status != 200:
        into.error = f"{into.status} {document.get('error', document)}"[:160]
        return
    (choice,) = document["choices"]
    into.text = choice.get("text") or (choice.get("message") or {}).get("content") or ""
    into.finish_reasons.append(choice["finish_reason"])


async def ask(
    client: httpx.AsyncClient, case: Case, *, stream: bool, timeout_s: float = HUNG_AFTER_S
) -> Outcome:
    """One request and the verdict on it."""
    started = time.monotonic()
    reading = Reading()
    try:
        async with asyncio.timeout(timeout_s):
            await read(client, case, stream=stream, into=reading)
    except TimeoutError:
        return Outcome(stream, started, time.monotonic(), "hung", f"after {len(reading.text)} characters")
    except (httpx.HTTPError, ValueError) as error:
        reading.error = reading.error or f"{type(error).__name__}: {error}"
    return Outcome(stream, started, time.monotonic(), *judge(case, reading))


def judge(case: Case, reading: Reading) -> tuple[Literal["ok", "wrong", "failed", "hung", "cut"], str]:
    """The verdict on an answer and what to say about it; half an answer must be half of the right one."""
    if not case.text.startswith(reading.text):
        return "wrong", f"{reading.text!r} instead of {case.text!r}"
    if reading.error is not None:
        return "failed", reading.error
    if not reading.done:
        return "cut", f"after {len(reading.text)} of {len(case.text)} characters"
    if reading.text != case.text or len(reading.finish_reasons) != 1:
        return "wrong", f"{reading.text!r}, ended {reading.finish_reasons}, instead of {case.text!r}"
    return "ok", ""


class Traffic:
    """Asks from several clients at once, in a thread with an event loop of its own.

    Args:
        base_url: of the API.
        known: what is asked, with its answers.
        clients: requests at once.
    """

    def __init__(self, base_url: str, known: Sequence[Case], clients: int = 6):
        self._known = known
        self._clients = clients
        self._base_url = base_url
        self._stopped = threading.Event()
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self.outcomes: list[Outcome] = []
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def stop(self) -> None:
        """Ask nothing new and wait for what is under way."""
        self._stopped.set()
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run something else in the same loop, beside the traffic, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _work(self) -> None:
        self._loop.run_until_complete(self._run())

    async def _run(self) -> None:
        async with http_client(self._base_url) as client:
            await asyncio.gather(*(self._ask_on(client, number) for number in range(self._clients)))

    async def _ask_on(self, client: httpx.AsyncClient, number: int) -> None:
        turn = number
        while not self._stopped.is_set():
            case = self._known[turn % len(self._known)]
            # Each case comes both ways, whatever the number of clients.
            stream = (turn // len(self._known) + turn) % 2 == 0
            outcome = await ask(client, case, stream=stream)
            self.outcomes.append(outcome)
            if outcome.verdict != "ok":
                await asyncio.sleep(0.2)  # as any client would, when nothing works
            turn += self._clients


def http_client(base_url: str) -> httpx.AsyncClient:
    """A client without limits of its own."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(base_url=base_url, timeout=None, limits=limits)  # noqa: S113 - `ask` bounds it


async def learn(base_url: str, unknown: Sequence[Case]) -> list[Case]:
    """The cases with their answers, as the deployment gives them now, one at a time.

    Raises:
        RuntimeError: it does not answer.
    """
    learnt = []
    async with http_client(base_url) as client:
        for case in unknown:
            reading = Reading()
            await read(client, case, stream=False, into=reading)
            if reading.error is not None or not reading.text:
                raise RuntimeError(f"no answer without a fault: {reading}")
            learnt.append(Case(case.path, case.body, reading.text))
    return learnt
