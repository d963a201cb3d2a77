"""Streams keep their order, their end and their errors; a draining replica ends them in time."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from dspark_ray.errors import RequestError
from dspark_ray.serving.drain import ASK_AGAIN_S, MARGIN_S, MISSED_CHECKS, DrainGuard
from dspark_ray.serving.ingress import OpenAiIngress
from dspark_ray.serving.streams import coalesce, stream_interval_s


class Source:
    def __init__(self, items: list, error: Exception | None = None, pause_s: float = 0.001):
        self.items, self.error, self.pause_s, self.closed = items, error, pause_s, False

    async def stream(self) -> AsyncGenerator:
        try:
            for item in self.items:
                yield item
                await asyncio.sleep(self.pause_s)
            if self.error:
                raise self.error
        finally:
            self.closed = True


async def test_nothing_is_lost_repeated_or_reordered_and_the_first_comes_at_once() -> None:
    source = Source([f"{number}," for number in range(40)])
    parts = [part async for part in coalesce(source.stream(), lambda: 0.01)]
    assert "".join(parts) == "".join(source.items)
    assert parts[0] == "0,"
    assert len(parts) < 20


async def test_other_objects_pass_in_their_place() -> None:
    mark = object()
    parts = [
        part async for part in coalesce(Source(["a", "b", mark, "c", "d"], pause_s=0).stream(), lambda: 0.01)
    ]
    before, after = parts[: parts.index(mark)], parts[parts.index(mark) + 1 :]
    assert ("".join(before), "".join(after)) == ("ab", "cd")


async def test_an_error_comes_after_what_was_said_before_it() -> None:
    said = []

    async def listen() -> None:
        said.extend([part async for part in parts])

    parts = coalesce(Source(["a", "b"], KeyError("x"), pause_s=0).stream(), lambda: 0.0)
    said.append(await anext(parts))
    said.append(await anext(parts))
    with pytest.raises(KeyError):
        await listen()
    assert said == ["a", "b"]


def test_a_busy_replica_joins_more_of_each_stream_but_no_client_waits_long() -> None:
    assert [stream_interval_s(streams) for streams in (0, 1, 4, 16, 64, 1000)] == [
        0.02,
        0.02,
        0.02,
        0.08,
        0.1,
        0.1,
    ]


async def test_closing_closes_the_source() -> None:
    source = Source(["a"] * 1000, pause_s=0.01)
    async with aclosing(coalesce(source.stream(), lambda: 0.0)) as parts:
        assert await anext(parts) == "a"
    assert source.closed


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Controller:
    there = True
    asked = 0

    async def answers(self) -> bool:
        self.asked += 1
        return self.there


def guard_of(clock: Clock, grace_s: float = 60.0) -> tuple[DrainGuard, Controller]:
    controller = Controller()
    return DrainGuard(grace_s, 5.0, controller.answers, clock), controller


async def test_streams_end_shortly_before_the_grace_is_over_and_not_without_a_drain() -> None:
    clock = Clock()
    guard, controller = guard_of(clock)
    assert guard.remaining_s() is None
    for _ in range(100):
        guard.checked()
        clock.now_s += 5.0
        assert guard.remaining_s() > 40.0
    clock.now_s += 60.0 - MARGIN_S - 5.0
    assert guard.remaining_s() <= 0.0
    assert await asyncio.gather(*(guard.is_drain() for _ in range(100))) == [True] * 100
    assert controller.asked == 1
    clock.now_s += 60.0  # still alive: the controller was away, this is no drain
    assert guard.remaining_s() is None


async def test_the_silence_of_a_controller_that_is_away_ends_no_stream() -> None:
    clock = Clock()
    guard, controller = guard_of(clock)
    guard.checked()
    controller.there = False
    clock.now_s += 60.0 - MARGIN_S
    for _ in range(100):
        assert guard.remaining_s() <= 0.0
        assert not await guard.is_drain()
        assert guard.remaining_s() == pytest.approx(ASK_AGAIN_S)
        clock.now_s += ASK_AGAIN_S
    controller.there = True
    assert not await guard.is_drain(), "it has just come back"
    clock.now_s += 60.0 - MARGIN_S
    assert await guard.is_drain(), "it is there, and drains this replica"
    guard.checked()
    assert not await guard.is_drain()


async def test_a_check_that_comes_while_the_controller_is_asked_is_no_drain() -> None:
    clock = Clock()
    guard, _ = guard_of(clock)
    guard.checked()
    clock.now_s += 60.0 - MARGIN_S

    async def checks() -> bool:
        guard.checked()
        return True

    guard._controller_answers = checks
    assert not await guard.is_drain()


@pytest.mark.parametrize("drains", [True, False])
async def test_a_silent_stream_ends_at_a_drain_and_goes_on_without_one(drains: bool) -> None:
    clock = Clock()
    ingress = object.__new__(OpenAiIngress)
    ingress._drain, controller = guard_of(clock)
    ingress._drain.checked()
    clock.now_s += 60.0 - MARGIN_S
    controller.there = drains
    parts = Source(["late"]).stream()
    if drains:
        with pytest.raises(RequestError, match="shutting down"):
            await ingress._next_part(parts)
    else:
        assert await ingress._next_part(parts) == "late"


def test_a_grace_shorter_than_the_checks_ends_no_healthy_stream() -> None:
    clock = Clock()
    guard, _ = guard_of(clock, grace_s=1.0)
    guard.checked()
    clock.now_s += (MISSED_CHECKS - 1) * 5.0
    assert guard.remaining_s() > 0
