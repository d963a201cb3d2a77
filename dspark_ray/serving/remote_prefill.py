"""The verifier's side of a remote prefill: ask a prefill replica, wait a bounded time, never fail a request.

Everything that can go wrong here (no replica, none free, one that dies or hangs) costs the caller only the
wait: it gets None and prefills the prompt itself.
"""

import asyncio
import contextvars
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0
ABANDONED_WAIT_S = 0.5
"""How long an answer that is under way may take after its client has left."""
STOPPED_WAIT_S = 5.0
"""How long a replica that has been told to stop may take to say how far it had come."""

TransferParams = dict[str, Any]
"""What the verifier's engine needs to fetch the KV: NIXL's address of the blocks in the prefill engine."""


@dataclass(frozen=True)
class PrefillRequest:
    """One prompt, on its way to a prefill replica."""

    request_uuid: str
    prompt_token_ids: list[int]
    cache_salt: str | None = None
    priority: int = 0


@dataclass(frozen=True)
class PrefillAccepted:
    """A prefill replica has the prompt in hand: what takes time from here on is work, not a queue."""


@dataclass(frozen=True)
class PrefillRefused:
    """The prompt itself is at fault. The verifier's engine will say so to the client."""


@dataclass(frozen=True)
class PrefillStopped:
    """The prompt was abandoned before its KV was ready: nothing is left of it in the prefill engine."""


@dataclass(frozen=True)
class PrefillDone:
    """The prompt's KV lies ready in the prefill engine until it is fetched, given up, or its lease ends."""

    transfer: TransferParams
    feature_endpoint: str | None = None
    """Where the prompt's context features can be fetched under the request's uuid; None without a drafter."""


PrefillEvent = PrefillAccepted | PrefillRefused | PrefillStopped | PrefillDone
Ask = Callable[[PrefillRequest], AsyncGenerator[PrefillEvent]]
"""Sends a request to some prefill replica. Closing the iterator early cancels the work there."""
GiveUp = Callable[[str, TransferParams], Awaitable[None]]
"""Tells the prefill engine that nobody will fetch these blocks."""
Stop = Callable[[str], Awaitable[bool]]
"""Has the replica that works on a prompt stop and end its answer; false when none works on it."""


class RemotePrefill:
    """Bounded, failure-tolerant prefill on another replica.

    Args:
        ask: sends one request.
        give_up: frees blocks that will not be fetched.
        stop: ends work that nobody waits for any more.
        queue_wait_s: longest wait for a replica to take the prompt.
        deadline_s: longest wait for the replica's work after that.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        ask: Ask,
        give_up: GiveUp,
        stop: Stop,
        queue_wait_s: float,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._ask = ask
        self._give_up = give_up
        self._stop = stop
        self._queue_wait_s = queue_wait_s
        self._deadline_s = deadline_s
        self._clock = clock
        self._pause_s = FIRST_PAUSE_S
        self._paused_until_s = -1.0
        self._background: set[asyncio.Task[None]] = set()
        self.waiting = 0
        """Requests that wait for their prefill now."""
        self.outcomes: Counter[str] = Counter()
        """How often each of done, refused, stopped, paused, late, failed and abandoned came out."""

    async def run(self, request: PrefillRequest) -> PrefillDone | None:
        """Have the prompt prefilled elsewhere.

        Returns:
            What the prefill replica answered, or None where the caller must prefill itself.
        """
        now_s = self._clock()
        if now_s < self._paused_until_s:
            self.outcomes["paused"] += 1
            return None
        if self._pause_s > FIRST_PAUSE_S:
            # The last one failed: this request alone finds out whether it works again.
            self._paused_until_s = now_s + self._queue_wait_s
        # A task of its own in an empty context: Serve cancels a cancelled request's calls at once, which
        # would lose the address of blocks that have just become ready and leave them to their lease.
        task = asyncio.create_task(self._exchange(request), context=contextvars.Context())
        self.waiting += 1
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._spawn(self._abandon(request, task))
            raise
        finally:
            self.waiting -= 1

    async def _exchange(self, request: PrefillRequest) -> PrefillDone | None:
        events = self._ask(request)
        accepted = False
        try:
            async with asyncio.timeout(self._queue_wait_s) as timer:
                async for event in events:
                    if isinstance(event, PrefillDone):
                        self._works("done")
                        return event
                    if isinstance(event, PrefillRefused):
                        self._works("refused")
                        return None
                    if isinstance(event, PrefillStopped):
                        self._works("stopped")
                        return None
                    accepted = True
                    timer.reschedule(asyncio.get_running_loop().time() + self._deadline_s)
            raise RuntimeError("the prefill replica ended without a result")
        except TimeoutError:
            self.outcomes["late"] += 1
            self._pause("did not finish" if accepted else "no prefill replica was free", request)
        except Exception as error:
            self.outcomes["failed"] += 1
            self._pause(f"{type(error).__name__}: {error}", request)
        finally:
            await events.aclose()
        return None

    def _works(self, outcome: str) -> None:
        self.outcomes[outcome] += 1
        self._pause_s = FIRST_PAUSE_S
        self._paused_until_s = -1.0

    def _pause(self, reason: str, request: PrefillRequest) -> None:
        """Spare the next requests the wait, longer each time until one prefill has worked again."""
        self._paused_until_s = self._clock() + self._pause_s
        logger.warning(
            "request %s is prefilled locally, as is everything for the next %.1f s: %s",
            request.request_uuid,
            self._pause_s,
            reason.splitlines()[-1] if reason else "",
        )
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    async def _abandon(self, request: PrefillRequest, task: asyncio.Task[PrefillDone | None]) -> None:
        """The client is gone: have the work stop, and free the blocks if it was done already.

        The replica is told instead of its call being cancelled: a cancelled call would not say that the blocks have
        just become ready, and they would be held until their lease ends.
        """
        self.outcomes["abandoned"] += 1
        try:
            told = not task.done() and await self._stop(request.request_uuid)
        except Exception:
            logger.warning(
                "request %s: its prefill could not be stopped", request.request_uuid, exc_info=True
            )
            told = False
        await asyncio.wait({task}, timeout=STOPPED_WAIT_S if told else ABANDONED_WAIT_S)
        if not task.done():
            task.cancel()  # queued still, or dead
        elif (prefilled := task.result()) is not None:
            await self._give_up(request.request_uuid, prefilled.transfer)

    def _spawn(self, work: Any) -> None:
        # In an empty context, too, so that its calls outlive the request.
        task = asyncio.create_task(work, context=contextvars.Context())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
