"""Verifiers that die, hang or are busy: what the client gets, and what it never gets."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.llm._internal.serve.core.configs.openai_api_models import CompletionRequest
from ray.serve.exceptions import BackPressureError
from test_continuation import events, read
from vllm.v1.engine.exceptions import EngineDeadError

from dspark_ray.config import FailoverConfig
from dspark_ray.errors import RequestError
from dspark_ray.serving.engine_watch import watch_engine
from dspark_ray.serving.failover import Accepted, Answer
from dspark_ray.serving.streams import HEARTBEAT

TEXTS = ["one ", "two ", "three ", "four"]
BUSY = BackPressureError(num_queued_requests=1, max_queued_requests=1)
HANG = object()
HERE = Accepted("weights")


class Verifiers:
    """What the verifiers say, one after the other; exceptions are raised, HANG is silence."""

    def __init__(self, *scripts: list[Any]):
        self.scripts = list(scripts)
        self.asked: list[Any] = []
        self.closed = 0

    async def ask(self, body: Any) -> AsyncGenerator[Any]:
        self.asked.append(body)
        try:
            for part in self.scripts.pop(0):
                if part is HANG:
                    await asyncio.sleep(3600)
                if isinstance(part, Exception):
                    raise part
                yield part
        finally:
            self.closed += 1


def said(n: int, created: int = 1) -> list[str]:
    """The first n events of the answer."""
    return events("completions", TEXTS, [], created)[:n]


WHOLE = said(99)


def answer(verifiers: Verifiers, reason: str | None = None, stream: bool = True, **config: Any) -> Any:
    outcomes: Counter[str] = Counter()
    clock = itertools.count()  # a second passes each time one looks

    async def sleep(_: float) -> None:
        await asyncio.sleep(0)

    body = CompletionRequest(model="m", prompt="Hi", stream=stream)
    bounds = FailoverConfig(**{"silence_s": 1, **config})
    note = lambda outcome: outcomes.update([outcome])  # noqa: E731
    one = Answer(verifiers.ask, body, reason, bounds, note, lambda: float(next(clock)), sleep)
    return one, outcomes


async def listen(one: Answer) -> str:
    return "".join([part async for part in one.parts()])


@pytest.mark.parametrize(
    "end",
    [RayActorError(), EngineDeadError(), HANG, HEARTBEAT],
    ids=["died", "engine died", "hung", "ended early"],
)
@pytest.mark.parametrize("got", [0, 1, 3, 4])
async def test_a_stream_goes_on_at_another_verifier(end: Any, got: int) -> None:
    verifiers = Verifiers([HERE, *said(got), end], [HERE, HEARTBEAT, *said(99, created=2)])
    one, outcomes = answer(verifiers)
    assert read(await listen(one))["text"] == "".join(TEXTS)
    assert verifiers.closed == len(verifiers.asked), (
        "nothing that a lost verifier may still say is listened to"
    )
    if got < 4:
        assert outcomes == {"continued" if got else "restarted": 1}
    else:  # it had finished, and nothing was missing but the sentinel
        assert len(verifiers.asked) == 1


async def test_one_whose_usage_is_missing_ends_with_an_error() -> None:
    verifiers = Verifiers([HERE, *said(4), RayActorError()])
    one, outcomes = answer(verifiers)
    one._body.stream_options = CompletionRequest(
        model="m", prompt="Hi", stream=True, stream_options={"include_usage": True}
    ).stream_options
    with pytest.raises(RequestError, match="usage"):
        await listen(one)
    assert outcomes == {"given_up": 1}


async def test_one_that_cannot_be_continued_ends_with_an_error_that_says_why() -> None:
    verifiers = Verifiers([HERE, *said(2), RayActorError()])
    one, outcomes = answer(verifiers, reason="of tools")
    parts = one.parts()
    assert [await anext(parts), await anext(parts)] == said(2), "unchanged"
    with pytest.raises(RequestError, match="of tools") as caught:
        await anext(parts)
    assert (caught.value.status, caught.value.code) == (503, "replica_died")
    assert caught.value.retry_after_s
    assert outcomes == {"given_up": 1}


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_of_which_nothing_was_said_is_given_from_the_beginning(stream: bool) -> None:
    verifiers = Verifiers([HERE, HEARTBEAT, RayActorError()], [RayActorError()], [BUSY], [HERE, "all"])
    one, outcomes = answer(verifiers, reason="of tools", stream=stream)
    assert await listen(one) == "all"
    assert all(body.vllm_xargs is None for body in verifiers.asked)
    assert outcomes == {"restarted": 1}


async def test_a_queue_is_no_silence_and_a_heartbeat_is_a_sign_of_life() -> None:
    async def slow(_: Any) -> AsyncGenerator[Any]:
        await asyncio.sleep(1.3)  # queued
        yield HERE
        for part in (HEARTBEAT, HEARTBEAT, *WHOLE):
            yield part
            await asyncio.sleep(0.5 if part == HEARTBEAT else 0)

    one, outcomes = answer(Verifiers())
    one._ask = slow
    assert read(await listen(one))["text"] == "".join(TEXTS)
    assert not outcomes


async def test_a_request_that_kills_its_engine_does_not_kill_them_all() -> None:
    verifiers = Verifiers(*[[HERE, *said(n), RayActorError()] for n in range(5)])
    one, _ = answer(verifiers, takeovers=2)
    with pytest.raises(RequestError, match="several verifiers"):
        await listen(one)
    assert len(verifiers.asked) == 3


async def test_the_wait_for_another_verifier_is_bounded() -> None:
    verifiers = Verifiers([HERE, *said(2), RayActorError()], *[[BUSY]] * 50)
    one, _ = answer(verifiers, wait_s=10)
    with pytest.raises(RequestError, match="no other verifier"):
        await listen(one)
    assert 2 < len(verifiers.asked) < 20


async def test_other_weights_do_not_finish_a_sentence() -> None:
    verifiers = Verifiers([HERE, *said(2), RayActorError()], [Accepted("newer"), *WHOLE])
    one, _ = answer(verifiers)
    with pytest.raises(RequestError, match="weights"):
        await listen(one)
    verifiers = Verifiers([HERE, RayActorError()], [Accepted("newer"), *WHOLE])
    assert read(await listen(answer(verifiers)[0]))["text"] == "".join(TEXTS)


@pytest.mark.parametrize("error", [BUSY, ValueError("yours")], ids=["busy", "other"])
async def test_what_is_no_loss_is_raised_at_once(error: Exception) -> None:
    verifiers = Verifiers([error], [HERE, *WHOLE])
    one, outcomes = answer(verifiers)
    with pytest.raises(type(error)):
        await listen(one)
    assert not outcomes


class Engine:
    """An engine client that answers until it is told not to."""

    def __init__(self) -> None:
        self.errored = self.busy = False
        self.output_processor = self
        self.answers: list[Any] = [None, None]

    def has_unfinished_requests(self) -> bool:
        return self.busy

    async def collective_rpc(self, method: str) -> list[None]:
        assert method == "check_health"
        answer = self.answers.pop(0)
        if answer is HANG:
            await asyncio.sleep(3600)
        if isinstance(answer, Exception):
            raise answer
        return [None]


@pytest.mark.parametrize(
    "end", [HANG, EngineDeadError(), RuntimeError("no")], ids=["hung", "dead", "failing"]
)
async def test_a_replica_ends_itself_when_its_engine_is_gone(end: Any) -> None:
    engine, reasons = Engine(), []
    engine.answers += [end]
    watch = asyncio.create_task(watch_engine(engine, 0.2, end=reasons.append, period_s=0.01))
    await asyncio.sleep(0.1)
    assert len(engine.answers) == 3, "an idle engine is not asked"
    engine.busy = True
    await watch
    assert len(reasons) == 1
    assert not engine.answers, "it answered before"


async def test_an_idle_engine_that_dies_is_noticed() -> None:
    engine, reasons = Engine(), []
    engine.errored = True
    await watch_engine(engine, 60, end=reasons.append, period_s=0.01)
    assert reasons == ["its engine has died"]


@pytest.mark.parametrize("told", [True, False])
async def test_an_engine_that_dies_while_it_is_asked_is_noticed_at_once(told: bool) -> None:
    """The question gets no answer then; until the replica has ended, it attracts requests and loses them."""
    engine, reasons, died = Engine(), [], asyncio.Event()
    engine.answers, engine.busy = [HANG], True
    period_s = 30 if told else 0.05
    watch = asyncio.create_task(watch_engine(engine, 60, died, reasons.append, period_s))
    await asyncio.sleep(0.1)
    engine.errored = True
    if told:
        died.set()
    async with asyncio.timeout(2):
        await watch
    assert reasons == ["its engine has died"]
