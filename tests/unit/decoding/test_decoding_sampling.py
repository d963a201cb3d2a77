"""Filters against the reference implementation in transformers, and the draw against its distribution."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dspark_ray.decoding.sampling import draw, exponential_noise, probabilities, to_target_vocabulary

SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 3, 50]),
        "top_p": st.sampled_from([0.05, 0.6, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1, 1.0]),
    }
)


def reference(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature), MinPLogitsWarper(min_p)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    warpers.append(TopPLogitsWarper(top_p))
    return warpers(torch.zeros(1, 0), logits).softmax(-1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.5, 3.0]), st.lists(SETTINGS, min_size=1, max_size=4))
def test_filters_equal_the_reference_row_by_row(seed: int, spread: float, rows: list[dict]):
    logits = torch.randn(len(rows), 20, generator=torch.Generator().manual_seed(seed)) * spread
    columns = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    together = probabilities(logits, columns.pop("temperature"), **columns)
    for row, values in enumerate(rows):
        expected = reference(logits[row : row + 1], **values)[0]
        torch.testing.assert_close(together[row], expected)
        torch.testing.assert_close(probabilities(logits[row], **values), expected)


def test_greedy_is_one_hot_also_beside_sampled_rows():
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 0.0]])
    probs = probabilities(logits, torch.tensor([1e-6, 1.0]))
    torch.testing.assert_close(probs, torch.tensor([[0.0, 1.0, 0.0], [1 / 3, 1 / 3, 1 / 3]]))
    assert probabilities(logits[0], 0.0).tolist() == [0.0, 1.0, 0.0]


def test_top_p_one_keeps_the_smallest_tail_beside_a_row_with_top_p():
    # In fp32 the cumulative sum of 50 000 probabilities reaches 1 before the end.
    probs = probabilities(torch.linspace(0, 25, 50_000).expand(2, -1), 1.0, top_p=torch.tensor([1.0, 0.5]))
    assert int((probs[0] > 0).sum()) == 50_000
    assert int((probs[1] > 0).sum()) < 2_000


def test_draws_have_the_distribution_and_repeat_with_the_noise():
    probs = torch.tensor([0.0, 0.1, 0.3, 0.6]).expand(200_000, 4)
    noise = exponential_noise(probs, torch.Generator().manual_seed(3))
    tokens = draw(probs, noise)
    share = torch.bincount(tokens, minlength=4) / len(tokens)
    torch.testing.assert_close(share, probs[0], atol=0.005, rtol=0)
    assert torch.equal(tokens, draw(probs, noise))


def test_draft_vocabulary_is_spread_over_the_target_vocabulary():
    spread = to_target_vocabulary(torch.tensor([[0.25, 0.75], [1.0, 0.0]]), torch.tensor([3, 1]), 5)
    assert spread.tolist() == [[0, 0.75, 0, 0.25, 0], [0, 0, 0, 1.0, 0]]


@pytest.mark.parametrize("value", [1e-4, 1.0])
def test_rows_sum_to_one(value: float):
    assert float(probabilities(torch.tensor([5.0, 5.0, -5.0]), 1.0, top_p=value).sum()) == pytest.approx(1)
