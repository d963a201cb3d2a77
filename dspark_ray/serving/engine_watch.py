"""A replica whose engine has died or hangs ends itself.

vLLM's own health check knows that an engine process is gone, but not that it has stopped answering, and Serve
takes three checks to act on it, during which an idle-looking replica attracts every new request. Ending the
process at once is what everybody understands: callers see a dead replica, Serve starts another.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import psutil

logger = logging.getLogger(__name__)

PERIOD_S = 1.0


class OutputProcessor(Protocol):
    """Knows what the engine has in hand."""

    def has_unfinished_requests(self) -> bool:
        """Whether anybody waits for it."""


class EngineClient(Protocol):
    """What is watched: vLLM's engine client."""

    output_processor: OutputProcessor

    @property
    def errored(self) -> bool:
        """Whether an engine process is gone."""

    collective_rpc: Callable[..., Awaitable[list[Any]]]


async def watch_engine(
    client: EngineClient,
    silence_s: float,
    died: asyncio.Event | None = None,
    end: Callable[[str], None] | None = None,
    period_s: float = PERIOD_S,
) -> None:
    """While somebody waits for the engine, ask its workers for a sign of life, until there is none.

    An idle engine is left in peace: each question has it spin for a second more.

    Args:
        client: of the engine.
        silence_s: longest wait for an answer, which comes between two engine steps.
        died: set by whoever learns first that `client.errored`; until the replica has ended, every request that
            still finds it is lost once more.
        end: called once with the reason; ends this process and those below it by default.
        period_s: pause between two questions.
    """
    told = asyncio.ensure_future((died or asyncio.Event()).wait())
    reason = None
    while reason is None:
        await asyncio.wait({told}, timeout=period_s)
        if not client.errored and client.output_processor.has_unfinished_requests():
            asking = asyncio.ensure_future(client.collective_rpc("check_health"))
            until = time.monotonic() + silence_s
            # A question that is under way when the engine dies gets no answer of any kind.
            while not (asking.done() or client.errored) and (left := until - time.monotonic()) > 0:
                await asyncio.wait(
                    {asking, told}, timeout=min(period_s, left), return_when=asyncio.FIRST_COMPLETED
                )
            if not asking.done():
                asking.cancel()
                reason = f"its engine has not answered for {silence_s:g} s"
            elif (error := asking.exception()) is not None:
                reason = f"its engine does not answer: {type(error).__name__}: {error}"
        if client.errored:
            reason = "its engine has died"
    told.cancel()
    (end or end_process)(reason)


def end_process(reason: str) -> None:
    """End this process, and first the engine's, which might be stopped and would keep their device."""
    logger.critical("this replica ends: %s", reason)
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(1)
