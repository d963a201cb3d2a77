"""Drafters that misbehave, as the verifier's client meets them: whatever comes, only well-formed drafts get through."""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tiny_drafter import BLOCK, VOCAB, WIDTH, tiny_model, tiny_runner

from dspark_ray.bench.drills.rogue import SPOILERS, RogueDrafter, Spoiler
from dspark_ray.drafter.service import DrafterService
from dspark_ray.protocol import DrafterRoute
from dspark_ray.target.drafter_client import DraftQuestion
from dspark_ray.target.remote_drafter import RemoteDrafters

CALLS = 12


@pytest.fixture
def real() -> Iterator[DrafterService]:
    service = DrafterService(
        tiny_runner(tiny_model(), window=16), fingerprint="pair", width=WIDTH, max_batch=8
    )
    serving = threading.Thread(target=service.run)
    serving.start()
    yield service
    service.stop()
    serving.join()


@contextmanager
def pool_of(*endpoints: str) -> Iterator[RemoteDrafters]:
    pool = RemoteDrafters(
        verifier="v", fingerprint="pair", width=WIDTH, vocab_size=VOCAB, secret=None, deadline_ms=100.0,
        drafters=[DrafterRoute(f"d{number}", endpoint, 1.0) for number, endpoint in enumerate(endpoints)],
    )  # fmt: skip
    try:
        yield pool
    finally:
        pool.close()


def question(key: str) -> DraftQuestion:
    return DraftQuestion(key, 0, torch.randn(5, WIDTH).bfloat16(), 7, BLOCK, fresh=True)


@pytest.mark.parametrize("kind", SPOILERS)
def test_only_well_formed_drafts_get_through(kind: str, real: DrafterService) -> None:
    rogue = RogueDrafter(real.endpoint, Spoiler(SPOILERS[kind], VOCAB))
    drafted = 0
    with closing_rogue(rogue), pool_of(rogue.endpoint) as pool:
        for number in range(300):
            (answer,) = pool.draft([question("a")], [])
            if answer is not None:
                drafted += bool(answer.draft_token_ids)
                assert len(answer.draft_token_ids) == len(answer.confidence_logits) <= BLOCK
                assert all(0 <= token < VOCAB for token in answer.draft_token_ids)
                assert all(map(math.isfinite, answer.confidence_logits))
            if rogue.calls >= CALLS and number >= CALLS:
                break
            time.sleep(0.03)
        pool.draft([], ["a"])
        noticed = pool.counters.bad_replies + pool.counters.deadline_misses
    assert rogue.calls >= CALLS
    assert noticed or kind in {"random tokens", "amnesia"}
    assert drafted or kind not in {"random tokens", "lost"}


@pytest.mark.parametrize("kind", ["corrupted", "ids outside the vocabulary", "misshapen"])
def test_requests_leave_a_drafter_whose_replies_cannot_be_used(kind: str, real: DrafterService) -> None:
    rogue = RogueDrafter(real.endpoint, Spoiler(SPOILERS[kind], VOCAB))
    with closing_rogue(rogue), pool_of(rogue.endpoint, real.endpoint) as pool:
        for number in range(
            200
        ):  # requests stay where they are first assigned: both must be connected by then
            keys = [f"warm{number}{part}" for part in "ab"]
            pool.draft([question(key) for key in keys], [])
            pool.draft([], keys)
            if rogue.calls and real.counters.calls > rogue.calls:
                break
            time.sleep(0.02)
        assert rogue.calls
        for _ in range(200):
            answers = pool.draft([question(key) for key in "abcd"], [])
            if all(answer and answer.draft_token_ids for answer in answers):
                break
            time.sleep(0.02)
        else:
            pytest.fail("some request never got drafts again")


@contextmanager
def closing_rogue(rogue: RogueDrafter) -> Iterator[None]:
    try:
        yield
    finally:
        rogue.stop()
