"""A verifier waits a bounded time for a prefill and loses nothing by it."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from dspark_ray.serving import remote_prefill
from dspark_ray.serving.remote_prefill import (
    PrefillAccepted,
    PrefillDone,
    PrefillRefused,
    PrefillRequest,
    PrefillStopped,
    RemotePrefill,
)

REQUEST = PrefillRequest("uuid", [1, 2, 3])
TRANSFER = {"remote_block_ids": [[4]]}
DONE = PrefillDone(TRANSFER, "tcp://10.0.0.1:5555")


class Replica:
    """A prefill pool that does what the test says."""

    def __init__(self, queue_s: float = 0.0, work_s: float = 0.0, fails: bool = False, refuses: bool = False):
        self.queue_s, self.work_s, self.fails, self.refuses = queue_s, work_s, fails, refuses
        self.calls = self.cancelled = 0
        self.told, self.stops = asyncio.Event(), True
        self.given_up: list[tuple[str, dict]] = []

    async def ask(self, _: PrefillRequest) -> AsyncGenerator:
        self.calls += 1
        try:
            await asyncio.sleep(self.queue_s)
            yield PrefillAccepted()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.told.wait(), self.work_s)
                yield PrefillStopped()
                return
            if self.fails:
                raise ConnectionError("replica died")
            yield PrefillRefused() if self.refuses else DONE
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def stop(self, request_uuid: str) -> bool:
        assert request_uuid == "uuid"
        if self.stops:
            self.told.set()
        return self.stops

    async def give_up(self, request_uuid: str, transfer: dict) -> None:
        self.given_up.append((request_uuid, transfer))


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def remote(replica: Replica, clock: Clock | None = None) -> RemotePrefill:
    return RemotePrefill(replica.ask, replica.give_up, replica.stop, 0.05, 0.3, clock or Clock())


async def test_work_may_take_longer_than_the_queue() -> None:
    prefill = remote(Replica(work_s=0.1))
    assert await prefill.run(REQUEST) == DONE


@pytest.mark.parametrize(
    "replica",
    [Replica(queue_s=9.0), Replica(work_s=9.0), Replica(fails=True)],
    ids=["none free", "hangs", "dies"],
)
async def test_no_answer_means_local_prefill_and_a_pause(replica: Replica) -> None:
    clock = Clock()
    prefill = remote(replica, clock)
    assert await prefill.run(REQUEST) is None
    assert await prefill.run(REQUEST) is None
    assert replica.calls == 1
    assert prefill.outcomes["paused"] == 1
    # After the pause one request alone tries; the pause doubles with each failure and ends with a success.
    clock.now_s += remote_prefill.FIRST_PAUSE_S
    assert await asyncio.gather(prefill.run(REQUEST), prefill.run(REQUEST)) == [None, None]
    assert replica.calls == 2
    clock.now_s += 1.5 * remote_prefill.FIRST_PAUSE_S
    assert await prefill.run(REQUEST) is None
    assert replica.calls == 2
    clock.now_s += remote_prefill.FIRST_PAUSE_S
    replica.queue_s, replica.work_s, replica.fails = 0.0, 0.0, False
    assert await prefill.run(REQUEST) == DONE
    assert await asyncio.gather(prefill.run(REQUEST), prefill.run(REQUEST)) == [DONE, DONE]


async def test_a_prompt_at_fault_pauses_nothing() -> None:
    replica = Replica(refuses=True)
    prefill = remote(replica)
    assert [await prefill.run(REQUEST), await prefill.run(REQUEST)] == [None, None]
    assert replica.calls == 2


async def leave(prefill: RemotePrefill, after_s: float) -> None:
    task = asyncio.create_task(prefill.run(REQUEST))
    await asyncio.sleep(after_s)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_blocks_that_come_after_the_client_left_are_given_up() -> None:
    """It had finished when it was told to stop, or it had not been found."""
    replica = Replica(work_s=0.1)
    replica.stops = False
    prefill = remote(replica)
    await leave(prefill, 0.05)
    assert not replica.given_up
    await asyncio.sleep(0.2)
    assert replica.given_up == [("uuid", TRANSFER)]
    assert replica.cancelled == 0


async def test_blocks_that_have_come_when_the_client_leaves_are_given_up() -> None:
    """The event is there, the task done, and the cancellation comes before anybody has looked."""
    replica = Replica()
    prefill = remote(replica)
    task = asyncio.create_task(prefill.run(REQUEST))
    while not prefill.outcomes["done"]:  # noqa: ASYNC110 - a turn of the loop at a time
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.01)
    assert replica.given_up == [("uuid", TRANSFER)]


async def test_work_is_stopped_not_cancelled_when_the_client_left() -> None:
    """Cancelled, it could not say that it had just finished."""
    replica = Replica(work_s=0.25)
    prefill = remote(replica)
    await leave(prefill, 0.02)
    await asyncio.sleep(0.02)
    assert replica.told.is_set()
    assert replica.cancelled == 0
    assert not replica.given_up
    assert (prefill.outcomes["abandoned"], prefill.outcomes["stopped"]) == (1, 1)
    assert await prefill.run(REQUEST) is None, "told again, it stops again"
    replica.told.clear()
    assert await remote(replica).run(REQUEST) == DONE, "no pause"


async def test_work_that_does_not_stop_is_cancelled(monkeypatch) -> None:
    monkeypatch.setattr(remote_prefill, "ABANDONED_WAIT_S", 0.05)
    replica = Replica(work_s=0.25)
    replica.stops = False
    await leave(remote(replica), 0.05)
    await asyncio.sleep(0.1)
    assert replica.cancelled == 1
    assert not replica.given_up
