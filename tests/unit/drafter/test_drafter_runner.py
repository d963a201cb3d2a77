"""The batched runner drafts what the model drafts from scratch, whatever the slots went through."""

import pytest
import torch
from drafter_recompute import BLOCK, VARIANTS, VOCAB, WIDTH, from_scratch, tiny_model, tiny_runner
from torch import Tensor

from dspark_ray.drafter.runner import DraftItem, DraftRunner
from dspark_ray.errors import ConfigError, ProtocolError

WINDOW = 8


def features(seed: int, count: int) -> Tensor:
    """[count, d] of positions 0..count-1 of one request."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def draft_one(runner: DraftRunner, item: DraftItem) -> Tensor:
    result = runner.draft([item])
    assert result.missing_from == [None]
    return result.draft_token_ids[0, : item.draft_len]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_ragged_batch_equals_singles_and_recomputation(variant: str):
    model = tiny_model(**VARIANTS[variant])
    runner = tiny_runner(model, window=WINDOW)
    # Contexts shorter and longer than the window, none, and every draft length; slots not in batch order.
    contexts, lengths = [3, 20, 8, 0, 1, 9, 30, 5], [5, 1, 4, 5, 0, 3, 5, 2]
    rows = [features(seed, n) for seed, n in enumerate(contexts)]
    items = [DraftItem(f"r{i}", 0, rows[i], 10 + i, lengths[i]) for i in range(8)]
    runner.draft([DraftItem(item.key, 0, item.features[:0], 0, 0) for item in reversed(items)])
    batch = runner.draft(items, return_hidden=True)
    for i, item in enumerate(items):
        n = item.draft_len
        single = tiny_runner(model, window=WINDOW).draft([item], return_hidden=True)
        if n:
            drafted, confidence, h = from_scratch(model, rows[i], 0, item.anchor_token_id, n, WINDOW)
            assert batch.draft_token_ids[i, :n].tolist() == drafted.tolist()
            torch.testing.assert_close(batch.confidence_logits[i, :n], confidence, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(batch.hidden[i, :n], h, atol=1e-4, rtol=1e-4)
        assert batch.draft_token_ids[i, n:].tolist() == [-1] * (BLOCK - n)
        assert single.draft_token_ids[0].tolist() == batch.draft_token_ids[i].tolist()
        torch.testing.assert_close(
            single.confidence_logits[0], batch.confidence_logits[i], atol=1e-4, rtol=1e-4
        )
        torch.testing.assert_close(single.hidden[0], batch.hidden[i], atol=1e-4, rtol=1e-4)


def test_the_block_starts_right_behind_the_context(model):
    """Fault 1: a prompt of 5 has context 0-4 and its block at 5."""
    rows = features(1, 5)
    result = tiny_runner(model).draft([DraftItem("a", 0, rows, 7, BLOCK)], return_hidden=True)
    torch.testing.assert_close(
        result.hidden[0], from_scratch(model, rows, 0, 7, BLOCK, WINDOW)[2], atol=1e-4, rtol=1e-4
    )
    one_early = from_scratch(model, rows[:4], 0, 7, BLOCK, WINDOW)[2]
    assert (result.hidden[0] - one_early).abs().max() > 0.01


def test_a_prompt_from_a_prefix_cache_lands_where_it_belongs(model):
    """Faults 7 and 8: 32 cached tokens have no features; 10 new ones lie at 32-41, also in a used slot."""
    rows = features(2, 42)
    window = 64
    runner = tiny_runner(model, window=window, slots=1)
    draft_one(runner, DraftItem("before", 0, features(3, 60), 1, BLOCK))
    runner.free(["before"])
    # Not saying that the context starts late is noticed, and nothing is drafted from wrong positions.
    unsaid = runner.draft([DraftItem("a", 32, rows[32:], 7, BLOCK)])
    assert (unsaid.missing_from, runner.slots_in_use) == ([0], 0)
    assert unsaid.draft_token_ids.tolist() == [[-1] * BLOCK]
    masked = draft_one(runner, DraftItem("a", 32, rows[32:], 7, BLOCK, fresh=True))
    assert masked.tolist() == from_scratch(model, rows[32:], 32, 7, BLOCK, window)[0].tolist()
    # Re-fed from where the drafter said, the draft equals that of a cold prompt.
    cold = draft_one(runner, DraftItem("a", 0, rows, 7, BLOCK))
    assert cold.tolist() == from_scratch(model, rows, 0, 7, BLOCK, window)[0].tolist()


def test_a_whole_window_needs_nothing_before_it(model):
    rows = features(4, 50)
    late = draft_one(tiny_runner(model), DraftItem("a", 42, rows[42:], 7, BLOCK))
    assert late.tolist() == from_scratch(model, rows, 0, 7, BLOCK, WINDOW)[0].tolist()


def test_chunks_equal_one_chunk(model):
    """Fault 9: 10 prompt tokens as 4/4/2."""
    rows = features(5, 10)
    runner = tiny_runner(model, window=16)
    for first, last in ((0, 4), (4, 8)):
        runner.draft([DraftItem("a", first, rows[first:last], 0, 0)])
    chunked = draft_one(runner, DraftItem("a", 8, rows[8:], 7, BLOCK))
    assert chunked.tolist() == from_scratch(model, rows, 0, 7, BLOCK, 16)[0].tolist()


def test_a_block_leaves_nothing_behind(model):
    """Fault 10: after two of five drafts were accepted, the slot equals a recompute from committed tokens."""
    rows = features(6, 9)
    runner = tiny_runner(model, window=16)
    draft_one(runner, DraftItem("a", 0, rows[:6], 7, BLOCK))
    # Positions 6 and 7 were drafted, never fed: they are missing.
    assert runner.draft([DraftItem("a", 8, rows[8:], 8, BLOCK)]).missing_from == [6]
    after = runner.draft([DraftItem("a", 6, rows[6:], 8, BLOCK)], return_hidden=True)
    torch.testing.assert_close(
        after.hidden[0], from_scratch(model, rows, 0, 8, BLOCK, 16)[2], atol=1e-4, rtol=1e-4
    )


def test_a_gap_is_named_and_spares_the_neighbours(model):
    runner = tiny_runner(model, window=16)
    rows, other = features(7, 12), features(8, 4)
    runner.draft([DraftItem("a", 0, rows[:5], 0, 0)])
    result = runner.draft([DraftItem("a", 8, rows[8:], 7, BLOCK), DraftItem("b", 0, other, 9, BLOCK)])
    assert result.missing_from == [5, None]
    assert result.draft_token_ids[0].tolist() == [-1] * BLOCK
    assert result.draft_token_ids[1].tolist() == from_scratch(model, other, 0, 9, BLOCK, 16)[0].tolist()
    refed = draft_one(runner, DraftItem("a", 5, rows[5:], 7, BLOCK))
    assert refed.tolist() == from_scratch(model, rows, 0, 7, BLOCK, 16)[0].tolist()


def test_the_least_recently_used_slot_goes_first_and_never_one_of_the_batch(model):
    runner = tiny_runner(model, slots=3)
    rows = features(9, 6)
    assert runner.capacity == 3
    for key in "abc":
        runner.draft([DraftItem(key, 0, rows[:5], 0, 0)])
    # d comes first in the batch, but a is used by the same call: b is the oldest of the others.
    result = runner.draft([DraftItem("d", 0, rows[:5], 7, 1), DraftItem("a", 5, rows[5:], 7, 1)])
    assert (result.missing_from, runner.slots_in_use) == ([None, None], 3)
    assert runner.draft([DraftItem(key, 5, rows[5:], 7, 1) for key in "bcd"]).missing_from == [0, None, None]
    runner.free(["a", "c", "d", "never there"])
    assert runner.slots_in_use == 0


def test_what_an_earlier_request_left_cannot_poison_a_batch(model):
    runner = tiny_runner(model, slots=2, window=16)
    runner.draft([DraftItem("sick", 0, torch.full((16, WIDTH), float("nan")), 7, BLOCK)])
    runner.free(["sick"])
    short, long = features(10, 2), features(11, 16)
    # Slot 0 is reused by a short context and read together with a long one: stale rows are masked, not gone.
    result = runner.draft([DraftItem("a", 0, short, 7, BLOCK), DraftItem("b", 0, long, 7, BLOCK)])
    assert result.draft_token_ids[0].tolist() == from_scratch(model, short, 0, 7, BLOCK, 16)[0].tolist()
    assert torch.isfinite(result.confidence_logits).all()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"draft_len": BLOCK + 1}, "draft_len"),
        ({"draft_len": -1}, "draft_len"),
        ({"features": torch.zeros(2, WIDTH + 1)}, "features"),
        ({"base_position": -1}, "base_position"),
        ({"anchor_token_id": VOCAB}, "anchor_token_id"),
        ({"key": "good"}, "key"),
    ],
)
def test_a_bad_item_is_refused_before_anything_changes(model, change: dict, field: str):
    runner = tiny_runner(model)
    good = {"base_position": 0, "features": features(12, 3), "anchor_token_id": 7, "draft_len": 2}
    with pytest.raises(ProtocolError, match=field):
        runner.draft([DraftItem("good", **good), DraftItem(**{"key": "bad", **good, **change})])
    assert runner.slots_in_use == 0


def test_more_items_than_a_call_takes_are_refused(model):
    with pytest.raises(ProtocolError, match="at most 1"):
        tiny_runner(model, max_batch=1).draft(
            [DraftItem(key, 0, features(13, 1), 7, 1) for key in ("a", "b")]
        )


def test_a_cache_that_cannot_hold_a_batch_is_refused(model):
    with pytest.raises(ConfigError, match="cache_mib"):
        tiny_runner(model, slots=3, max_batch=4)


def test_a_failed_call_leaves_no_slot_that_claims_unwritten_rows(model):
    runner = tiny_runner(model)

    def failing(logits: Tensor, slot: int) -> Tensor:
        raise RuntimeError("out of memory")

    runner.draft([DraftItem("other", 0, features(14, 3), 7, 0)])
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.draft([DraftItem("a", 0, features(14, 3), 7, BLOCK)], choose=failing)
    assert runner.slots_in_use == 1


def test_drafts_can_be_sampled_with_rows_in_the_order_of_the_items(model):
    runner = tiny_runner(model)
    rows = [features(15, 4), features(16, 6), features(17, 2)]
    keys = ["a", "b", "c"]
    runner.draft([DraftItem(key, 0, r[:0], 0, 0) for key, r in zip(keys, rows, strict=True)])
    seen: list[Tensor] = []

    def second_best(logits: Tensor, slot: int) -> Tensor:
        seen.append(logits)
        return logits.topk(2).indices[:, 1]

    order = [2, 0, 1]
    result = runner.draft([DraftItem(keys[i], 0, rows[i], 20 + i, 3) for i in order], choose=second_best)
    assert len(seen) == 3
    for row, i in enumerate(order):
        alone: list[Tensor] = []
        tiny_runner(model).draft(
            [DraftItem("x", 0, rows[i], 20 + i, 3)],
            choose=lambda logits, slot, alone=alone: alone.append(logits) or logits.topk(2).indices[:, 1],
        )
        torch.testing.assert_close(seen[2][row], alone[2][0], atol=1e-4, rtol=1e-4)
        assert result.draft_token_ids[row, 2] == alone[2][0].topk(2).indices[1]


def test_a_low_precision_runner_stays_close_and_leaves_the_callers_model_alone(model):
    rows = features(18, 12)
    runner = DraftRunner(
        model, cache_bytes=1 << 20, window=WINDOW, max_batch=2, device="cpu", dtype=torch.bfloat16
    )
    low = runner.draft([DraftItem("a", 0, rows, 7, BLOCK)], return_hidden=True).hidden[0].float()
    exact = from_scratch(model, rows, 0, 7, BLOCK, WINDOW)[2]
    assert torch.cosine_similarity(low, exact).min() > 0.99
    assert model.dtype == torch.float32
