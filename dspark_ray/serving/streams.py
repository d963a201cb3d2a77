"""Streams of server-sent events between replica and client."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

_END = object()
HEARTBEAT = ""
"""What a replica says when it has nothing to say, so that its silence means something."""
SHORTEST_INTERVAL_S, LONGEST_INTERVAL_S = 0.02, 0.1
MESSAGES_PER_S = 200
"""Of one replica, while the longest interval allows it: each costs milliseconds of CPU in three processes."""


def stream_interval_s(streams: int) -> float:
    """Shortest time between two messages of one stream when a replica has so many of them."""
    return min(LONGEST_INTERVAL_S, max(SHORTEST_INTERVAL_S, streams / MESSAGES_PER_S))


async def coalesce(source: AsyncGenerator[Any], interval_s: Callable[[], float]) -> AsyncGenerator[Any]:
    """Join the strings of a fast stream: the first at once, then what has come by the end of each interval.

    Each message between replicas costs milliseconds of CPU, so one message per token and request would cap
    the throughput of a busy machine. Items that are not strings pass unchanged and in order.

    Args:
        source: strings and other objects. Closed when this generator is.
        interval_s: shortest time between two items, asked anew after each.

    Raises:
        Exception: whatever the source raises, after everything it has yielded before.
    """
    queue: asyncio.Queue[Any] = asyncio.Queue()

    async def pump() -> None:
        try:
            async for item in source:
                queue.put_nowait(item)
        finally:
            queue.put_nowait(_END)

    task = asyncio.create_task(pump())
    try:
        while True:
            items = [await queue.get()]
            while not queue.empty():
                items.append(queue.get_nowait())
            for joined in _joined(items):
                if joined is _END:
                    await task
                    return
                yield joined
            await asyncio.sleep(interval_s())
    finally:
        task.cancel()
        await asyncio.wait([task])
        await source.aclose()


async def with_heartbeats(source: AsyncGenerator[Any], every_s: float) -> AsyncGenerator[Any]:
    """The items of a source, and `HEARTBEAT` whenever it has been silent for a while.

    Args:
        source: closed when this generator is.
        every_s: longest silence.

    Raises:
        Exception: whatever the source raises.
    """

    async def step() -> Any:
        return await anext(source, _END)

    pending: asyncio.Task[Any] | None = None
    try:
        while True:
            pending = pending or asyncio.create_task(step())
            done, _ = await asyncio.wait({pending}, timeout=every_s)
            if not done:
                yield HEARTBEAT
                continue
            item, pending = pending.result(), None
            if item is _END:
                return
            yield item
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.wait({pending})
        await source.aclose()


def _joined(items: list[Any]) -> list[Any]:
    joined: list[Any] = []
    for item in items:
        if joined and isinstance(item, str) and isinstance(joined[-1], str):
            joined[-1] += item
        else:
            joined.append(item)
    return joined
