"""A paired run: all arms meet each load in turns, several times over, so that a busy machine is busy for all."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence

from dspark_ray.bench.arms import Arm, Offer, turns
from dspark_ray.bench.load import LoadEngine
from dspark_ray.bench.results import TurnRecord, turn_record
from dspark_ray.bench.speculation import Deployment, Watch

SETTLE_TOKENS = 24
"""Longest answer of the unmeasured load before each turn, in which the engine gets used to the arm."""

Progress = Callable[[int, int, TurnRecord], None]


class PairedRun:
    """Offers loads to arms.

    Args:
        engine: makes the load.
        arms: their names differ, their models are known.
        deployment: of the arms that have a mode; None where none has.
        seed: of arrivals.
        progress: called with the number of turns done, of all, and the last one.
    """

    def __init__(
        self,
        engine: LoadEngine,
        arms: Sequence[Arm],
        deployment: Deployment | None,
        *,
        seed: int,
        progress: Progress,
    ):
        self._engine = engine
        self._arms = list(arms)
        self._deployment = deployment
        self._seed = seed
        self._progress = progress

    def run(self, offers: Sequence[Offer], rounds: int) -> list[TurnRecord]:
        """All turns: each load in turn, each round of it with all arms. A turn that fails is a record, too."""
        records: list[TurnRecord] = []
        total = len(offers) * rounds * len(self._arms)
        first = 0
        for offer in offers:
            for number, arm in turns(self._arms, rounds):
                records.append(self._turn(arm, offer, number, first + number * offer.requests))
                self._progress(len(records), total, records[-1])
            first += rounds * offer.requests
        return records

    def _turn(self, arm: Arm, offer: Offer, number: int, first: int) -> TurnRecord:
        began = time.monotonic()
        try:
            return self._offer(arm, offer, number, first)
        except Exception as error:  # one arm's failure must not cost the others' figures
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            seconds = time.monotonic() - began
            return TurnRecord(
                arm.name, offer.label, number, seconds, [], {}, failed=offer.requests, error=text
            )

    def _offer(self, arm: Arm, offer: Offer, number: int, first: int) -> TurnRecord:
        watched = self._deployment if arm.mode is not None else None
        if watched is not None:
            watched.set_mode(arm)
        at_once = offer.streams or max(1, round(offer.rate_per_s or 1))
        settle = Offer(streams=at_once, requests=at_once)
        # Prompts from the other end, so that no measured one is in a prefix cache already.
        asyncio.run(
            self._engine.offer(arm, settle, first=-1 - first - at_once, seed=0, max_tokens=SETTLE_TOKENS)
        )
        seed = self._seed + number
        watch = Watch(watched, arm.model) if watched is not None else None
        with watch or contextlib.nullcontext():
            turn = asyncio.run(self._engine.offer(arm, offer, first=first, seed=seed))
        return turn_record(
            arm.name, offer.label, number, turn,
            closed_loop=offer.streams is not None,
            counts=watch.counts if watch else None,
            step_table=watch.step_table if watch else ([], []),
            load_average=os.getloadavg()[0],
        )  # fmt: skip
