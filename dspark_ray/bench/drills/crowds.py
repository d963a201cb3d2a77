"""Clients as a fault: that leave, that read slowly, that come all at once, that fill the memory."""

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from typing import Any

import httpx

from dspark_ray.bench.drills.deployment import KV_BLOCKS, MODEL, Deployment
from dspark_ray.bench.drills.drill import Drill, Fault
from dspark_ray.bench.drills.traffic import (
    Case,
    Outcome,
    Reading,
    Traffic,
    ask,
    http_client,
    judge,
    read,
    read_event,
)

ABORTS_AT_ONCE = 24
LONGEST_STAY_S = 2.0
STREAMS = 128
SLOW_READERS = 16
GLANCE_S = 0.4
CROWD_PATIENCE_S = 300.0


def _story(number: int, words: int, tokens: int) -> Case:
    """A request that keeps its engine busy: a prompt of its own, an answer of exactly so many tokens."""
    prompt = f"Story {number}: " + "once there was a river " * (words // 5)
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    return Case("/v1/completions", body | {"temperature": 0})


def abort_storm(aborts: int, deployment: Deployment, traffic: Traffic) -> Fault:
    """Clients that leave, each after a random time: queued, in prefill, in transfer, in mid-stream."""
    rng = random.Random(3)  # noqa: S311
    left_at: dict[str, int] = {"before the first byte": 0, "in mid-stream": 0, "after the end": 0}

    async def one(client: httpx.AsyncClient, number: int) -> None:
        reading = Reading()
        case = _story(number, rng.choice((5, 60, 200)), 100)
        stay_s = rng.random() ** 2 * LONGEST_STAY_S
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(stay_s):
                await read(client, case, stream=rng.random() < 0.7, into=reading)
        phase = (
            "after the end" if reading.done else "in mid-stream" if reading.text else "before the first byte"
        )
        left_at[phase] += 1

    async def storm() -> None:
        numbers = iter(range(aborts))

        async def client_after_client(client: httpx.AsyncClient) -> None:
            for number in numbers:
                await one(client, number)

        async with http_client(deployment.base_url) as client:
            await asyncio.gather(*(client_after_client(client) for _ in range(ABORTS_AT_ONCE)))

    started = time.monotonic()
    traffic.run(storm())
    return Fault(notes={"left": left_at, "storm_s": round(time.monotonic() - started)})


def slow_readers(deployment: Deployment, traffic: Traffic, known: Sequence[Case]) -> Fault:
    """Clients that read a piece now and then: they get everything, and hold nobody up."""

    async def one(client: httpx.AsyncClient, case: Case) -> Outcome:
        started, reading, rest = time.monotonic(), Reading(), ""
        try:
            async with client.stream("POST", case.path, json=case.body | {"stream": True}) as response:
                async for piece in response.aiter_text(64):
                    *lines, rest = (rest + piece).split("\n")
                    for line in lines:
                        read_event(line, reading)
                    await asyncio.sleep(GLANCE_S / 10)
        except httpx.HTTPError as error:
            reading.error = f"{type(error).__name__}: {error}"
        return Outcome(True, started, time.monotonic(), *judge(case, reading))

    async def all_of_them() -> list[Outcome]:
        async with http_client(deployment.base_url) as client:
            chosen = (known[number % len(known)] for number in range(SLOW_READERS))
            return await asyncio.gather(*(one(client, case) for case in chosen))

    return Fault(outcomes=traffic.run(all_of_them()))


def many_streams(deployment: Deployment, traffic: Traffic, known: Sequence[Case]) -> Fault:
    """More streams at once than there are seats."""

    async def all_of_them() -> list[Outcome]:
        async with http_client(deployment.base_url) as client:
            chosen = (known[number % len(known)] for number in range(STREAMS))
            return await asyncio.gather(
                *(ask(client, case, stream=True, timeout_s=CROWD_PATIENCE_S) for case in chosen)
            )

    return Fault(outcomes=traffic.run(all_of_them()))


def memory_pressure(deployment: Deployment, traffic: Traffic, _known: Sequence[Case]) -> Fault:
    """Requests of the longest kind, where the KV cache holds two: engines preempt and begin anew."""
    stories = [_story(number, 270, 150) for number in range(3 * deployment.shape.verifiers)]

    async def answers(at_once: int) -> list[Reading]:
        readings = [Reading() for _ in stories]
        seats = asyncio.Semaphore(at_once)

        async def one(client: httpx.AsyncClient, case: Case, reading: Reading) -> None:
            async with seats, asyncio.timeout(CROWD_PATIENCE_S):
                await read(client, case, stream=True, into=reading)

        async with http_client(deployment.base_url) as client:
            await asyncio.gather(*(one(client, c, r) for c, r in zip(stories, readings, strict=True)))
        return readings

    def preempted() -> int:
        return sum(v["requests_preempted"] for v in deployment.stats(f"Verifier:{MODEL}").values())

    before = preempted()
    together = traffic.run(answers(len(stories)))
    preemptions = preempted() - before
    alone = traffic.run(answers(1))
    known = [Case(c.path, c.body, r.text) for c, r in zip(stories, alone, strict=True)]
    now = time.monotonic()
    outcomes = [Outcome(True, now, now, *judge(c, r)) for c, r in zip(known, together, strict=True)]
    problems = [] if preemptions else ["no request was preempted: there was no pressure"]
    return Fault(
        outcomes=outcomes, problems=problems, notes={"preempted": preemptions, "kv_blocks": KV_BLOCKS}
    )


CROWD_DRILLS = (
    *(
        Drill(f"abort storm of {count}", lambda d, traffic, _, count=count: abort_storm(count, d, traffic))
        for count in (1000, 100)
    ),
    Drill("slow readers", slow_readers),
    Drill("128 streams", many_streams, clients=2),
    Drill("memory pressure", memory_pressure, clients=2),
)
