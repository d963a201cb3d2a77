"""Feature rows of requests: windows, gaps, late beginnings, shared prefixes (faults 1, 7-10)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_ray.target.context import RequestContexts, StartedRequest, StepRow
from dspark_ray.target.feature_store import ContextRows
from dspark_ray.target.prefix_features import PrefixFeatures
from dspark_ray.target.stats import ShimStats

WINDOW, WIDTH = 16, 2


def rows_at(first: int, last: int) -> torch.Tensor:
    """Rows that carry their own position, in two numbers that bf16 holds exactly."""
    positions = torch.arange(first, last)
    return torch.stack([positions // 64, positions % 64], dim=1).float()


def positions_of(context: ContextRows) -> list[int]:
    return [64 * high + low for high, low in context.rows_from(context.low).int().tolist()]


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, 200, dtype=np.int32)[:count]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(0, 9))
def test_any_chunking_keeps_the_last_window_in_order(chunks: list[int], overlap: int):
    """Fault 9: several chunks equal one; a resumed request's overlap changes nothing."""
    context, end = ContextRows(WINDOW, WIDTH), 0
    for size in chunks:
        first = max(0, end - overlap)
        context.append(first, rows_at(first, end + size))
        end += size
    assert context.have == end
    assert positions_of(context) == list(range(max(0, end - WINDOW), end))


def test_a_gap_forgets_what_was_before_it():
    """Fault 8: after a prefix hit of 32 with 10 new tokens, features stand at 32..41, used slot or not."""
    context = ContextRows(WINDOW, WIDTH)
    context.append(0, rows_at(0, 5))
    context.sent = 5
    context.append(32, rows_at(32, 42))
    assert (context.low, context.have) == (32, 42)
    assert positions_of(context) == list(range(32, 42))
    assert context.unsent() == (32, True)


@pytest.mark.parametrize(("first", "joins"), [(20, True), (4, True), (27, True), (30, False)])
def test_a_late_beginning_is_put_in_front_if_it_joins(first: int, joins: bool):
    """A hand-off that arrives some steps late still gives the drafter its context."""
    context = ContextRows(WINDOW, WIDTH)
    context.append(29, rows_at(29, 33))
    context.sent = 33
    assert context.prepend(first, rows_at(first, 30)) is joins
    low = max(first, 33 - WINDOW) if joins else 29
    assert positions_of(context) == list(range(low, 33))
    assert context.sent == (None if joins else 33)


def test_a_beginning_that_ends_too_early_is_refused():
    context = ContextRows(WINDOW, WIDTH)
    context.append(29, rows_at(29, 33))
    assert not context.prepend(10, rows_at(10, 28))
    assert positions_of(context) == [29, 30, 31, 32]


def test_what_the_drafter_lacks_is_sent_again_and_no_more():
    context = ContextRows(WINDOW, WIDTH)
    context.append(0, rows_at(0, 30))
    assert context.unsent() == (14, True)
    context.sent = 30
    context.append(30, rows_at(30, 33))
    assert context.unsent() == (30, False)
    context.missing(25)  # it lost the tail
    assert context.unsent() == (25, False)
    context.missing(3)  # older than what is kept here
    assert context.unsent() == (17, True)
    context.sent = 33
    context.append(33, rows_at(33, 60))  # drafting was off for longer than the window
    assert context.unsent() == (44, False)


def test_tokens_that_were_taken_back_take_their_features_along():
    context = ContextRows(WINDOW, WIDTH)
    context.append(0, rows_at(0, 12))
    context.sent = 12
    context.truncate(9)
    context.append(9, rows_at(9, 11))
    assert positions_of(context) == list(range(11))
    assert context.unsent() == (9, False)


def contexts(prefix: PrefixFeatures | None = None) -> RequestContexts:
    return RequestContexts(WINDOW, WIDTH, prefix=prefix, stats=ShimStats())


def prompt_step(key: str, first: int, last: int, ids: np.ndarray, *, done: bool) -> StepRow:
    return StepRow(key, first, last - first, ids, int(ids[-1]) if done else None)


@settings(deadline=None)
@given(st.lists(st.integers(1, 13), min_size=1, max_size=8), st.integers(1, 3))
def test_a_cached_prefix_brings_the_features_that_were_computed_for_it(chunks: list[int], other_blocks: int):
    """Fault 7: the second run of a prompt starts with the context of the first, whatever its chunks were."""
    block, length = 4, sum(chunks)
    prefix = PrefixFeatures(block, WIDTH, 1 << 20)
    held = contexts(prefix)
    ids = tokens(length + 1)
    held.start([StartedRequest("a", 0, ids[:length], {})])
    first = 0
    for index, size in enumerate(chunks):
        row = prompt_step("a", first, first + size, ids, done=index == len(chunks) - 1)
        held.advance([row], rows_at(first, first + size))
        first += size
    hit = (length - 1) // block * block
    held.start([StartedRequest("b", hit, ids[:length], {})])
    held.advance([prompt_step("b", hit, length, ids, done=True)], rows_at(hit, length))
    low = max(0, (hit - WINDOW + block - 1) // block * block, length - WINDOW)
    assert positions_of(held["b"])[-(length - low) :] == list(range(low, length))
    assert held["b"].low <= low
    # another prompt with the same blocks later on shares nothing
    other = tokens(length + 1, seed=1)
    held.start([StartedRequest("c", hit, other[:length], {})])
    held.advance([prompt_step("c", hit, length, other, done=True)], rows_at(hit, length))
    assert held["c"].low == hit or hit == 0


def test_prefix_features_stay_within_their_memory():
    prefix = PrefixFeatures(4, WIDTH, 3 * 4 * WIDTH * 2)
    held = contexts(prefix)
    for number in range(9):
        ids = tokens(21, seed=number)
        held.start([StartedRequest(str(number), 0, ids[:20], {})])
        held.advance([prompt_step(str(number), 0, 20, ids, done=True)], rows_at(0, 20))
    assert len(prefix) == 3
    assert held.finish(map(str, range(9))) == list(map(str, range(9)))
    assert len(held) == 0
