"""The loss against values worked out by hand and against autograd of its plain definition."""

import math

import pytest
import torch

from dspark_ray.training.losses import expected_accept_len, position_weights, slot_terms


def test_position_weights_and_accept_length_count_the_first_slot() -> None:
    """Fault 3."""
    weights = position_weights(5, 4.0)
    assert weights[0] == 1
    torch.testing.assert_close(weights, torch.tensor([math.exp(-k / 4) for k in range(5)]))
    assert float(expected_accept_len(torch.tensor([0.5, 0.5]))) == 1.75


def test_terms_of_a_worked_example() -> None:
    """q = (.5, .25, .25), p = (.25, .5, .25): CE ln 2, KL .25 ln 2, TV .5, overlap .75."""
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log().requires_grad_()
    teacher = torch.tensor([[0.25, 0.5, 0.25]]).log()
    terms = slot_terms(
        logits, teacher, torch.tensor([0]), torch.tensor([0]), torch.tensor([1.0]), (1.0, 2.0, 4.0)
    )
    ln2 = math.log(2)
    torch.testing.assert_close(terms.sums, torch.tensor([ln2, 0.25 * ln2, 0.5]))
    assert float(terms.loss.detach()) == pytest.approx(ln2 + 0.5 * ln2 + 2)
    assert float(terms.overlap[0]) == pytest.approx(0.75)
    assert int(terms.best[0]) == 0


@pytest.mark.parametrize("weights", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.1, 0.3, 0.9)])
def test_gradient_equals_autograd_with_a_reduced_vocabulary(weights: tuple[float, float, float]) -> None:
    """Teacher rows sum to less than 1: what lies outside the draft vocabulary is missed mass."""
    torch.manual_seed(0)
    full, inside, slots = 11, 6, 70  # more slots than one chunk
    logits = torch.randn(slots, inside, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(9, full, dtype=torch.float64).log_softmax(-1)[:, :inside]
    rows, ids = torch.randint(0, 9, (slots,)), torch.randint(-1, inside, (slots,))
    scale = torch.rand(slots, dtype=torch.float64)
    log_q = logits.log_softmax(-1)
    p = teacher.exp()[rows]
    ce = torch.where(ids >= 0, -log_q.gather(1, ids.clamp(min=0)[:, None])[:, 0], 0.0)
    kl = (p * (teacher[rows] - log_q)).sum(-1)
    tv = (log_q.exp() - p).abs().sum(-1) + 1 - p.sum(-1)
    expected = (scale * (weights[0] * ce + weights[1] * kl + weights[2] * tv)).sum()
    (gradient,) = torch.autograd.grad(expected, logits)

    ours = logits.detach().float().requires_grad_()
    terms = slot_terms(ours, teacher.float(), rows, ids, scale.float(), weights)
    (3 * terms.loss).backward()
    torch.testing.assert_close(terms.loss.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.grad.double(), 3 * gradient, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(terms.overlap.double(), 1 - tv / 2, rtol=1e-5, atol=1e-5)
