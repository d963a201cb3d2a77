"""Streams keep their order, their end and their errors; a draining replica ends them in time."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from dspark_ray.serving.drain import MARGIN_S, MISSED_CHECKS, DrainGuard
from dspark_ray.serving.streams import coalesce


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
    parts = [part async for part in coalesce(source.stream(), 0.01)]
    assert "".join(parts) == "".join(source.items)
    assert parts[0] == "0,"
    assert len(parts) < 20


async def test_other_objects_pass_in_their_place() -> None:
    mark = object()
    parts = [part async for part in coalesce(Source(["a", "b", mark, "c", "d"], pause_s=0).stream(), 0.01)]
    before, after = parts[: parts.index(mark)], parts[parts.index(mark) + 1 :]
    assert ("".join(before), "".join(after)) == ("ab", "cd")


async def test_an_error_comes_after_what_was_said_before_it() -> None:
    said = []

    async def listen() -> None:
        said.extend([part async for part in parts])

    parts = coalesce(Source(["a", "b"], KeyError("x"), pause_s=0).stream(), 0.0)
    said.append(await anext(parts))
    said.append(await anext(parts))
    with pytest.raises(KeyError):
        await listen()
    assert said == ["a", "b"]


async def test_closing_closes_the_source() -> None:
    source = Source(["a"] * 1000, pause_s=0.01)
    async with aclosing(coalesce(source.stream(), 0.0)) as parts:
        assert await anext(parts) == "a"
    assert source.closed


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_streams_end_shortly_before_the_grace_is_over_and_not_without_a_drain() -> None:
    clock = Clock()
    guard = DrainGuard(grace_s=60.0, check_period_s=5.0, clock=clock)
    assert guard.remaining_s() is None
    for _ in range(100):
        guard.checked()
        clock.now_s += 5.0
        assert guard.remaining_s() > 40.0
    clock.now_s += 60.0 - MARGIN_S - 5.0
    assert guard.remaining_s() <= 0.0
    clock.now_s += 60.0  # still alive: the controller was away, this is no drain
    assert guard.remaining_s() is None


def test_a_grace_shorter_than_the_checks_ends_no_healthy_stream() -> None:
    clock = Clock()
    guard = DrainGuard(grace_s=1.0, check_period_s=5.0, clock=clock)
    guard.checked()
    clock.now_s += (MISSED_CHECKS - 1) * 5.0
    assert guard.remaining_s() > 0
