"""The heads against dspark-spec section 1, written out again by hand."""

from collections.abc import Callable

import pytest
import torch

from dspark_ray.drafter.heads import ConfidenceHead, MarkovHead
from dspark_ray.drafter.model import DSparkModel


def randomised(head: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(1)
    for parameter in head.parameters():
        parameter.data = torch.randn_like(parameter)
    return head.requires_grad_(False)


def test_vanilla_bias_is_w2_times_the_previous_tokens_row() -> None:
    head = randomised(MarkovHead("vanilla", 7, 6, 2, 3, temp_scale=True))
    expected = head.temp_scale * (head.markov_w2.weight @ head.markov_w1.weight[4])
    mixed, _ = head.mix(head.embed(torch.tensor(4)), torch.zeros(3), None)
    torch.testing.assert_close(head.bias(mixed), expected)


def test_gated_head_gates_the_row_by_hidden_state_and_row() -> None:
    head = randomised(MarkovHead("gated", 7, 6, 2, 3))
    h, e = torch.randn(3), head.markov_w1.weight[2]
    gate = torch.sigmoid(head.gate_proj.weight @ torch.cat([h, e]) + head.gate_proj.bias)
    mixed, _ = head.mix(e, h, None)
    torch.testing.assert_close(head.bias(mixed), head.markov_w2.weight @ (gate * e))


def test_rnn_head_carries_its_state_and_teacher_forcing_equals_stepping() -> None:
    head = randomised(MarkovHead("rnn", 7, 6, 2, 3))
    ids, h = torch.tensor([3, 1, 5]), torch.randn(3, 3)
    state, expected = torch.zeros(2), []
    for k in range(3):
        e = head.markov_w1.weight[ids[k]]
        gate, candidate, out = (
            head.joint_proj.weight @ torch.cat([state, e, h[k]]) + head.joint_proj.bias
        ).split(2)
        state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
        expected.append(torch.tanh(out))
    torch.testing.assert_close(head.mix_all(head.embed(ids), h), torch.stack(expected))


def test_linear_confidence_is_blind_to_the_drafted_token_and_mlp_is_not() -> None:
    h, previous, drafted = torch.randn(3), torch.randn(2), torch.randn(2, 3)
    linear = randomised(ConfidenceHead("linear", 3, 2))
    weight, bias = linear.proj.weight[0], linear.proj.bias[0]
    torch.testing.assert_close(linear(h, previous, drafted[0]), weight @ torch.cat([h, previous]) + bias)
    assert linear(h, previous, drafted[0]) == linear(h, previous, drafted[1])
    mlp = randomised(ConfidenceHead("mlp", 3, 0))
    assert mlp(h, None, drafted[0]) != mlp(h, None, drafted[1])


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_rollout_feeds_each_token_to_the_next_slot(make_model: Callable[..., DSparkModel], kind: str) -> None:
    """Fault 2: with anchor a and drafts b, c, d the previous tokens are a, b, c."""
    model = make_model(markov_head_type=kind, draft_vocab_size=20)
    h = torch.randn(1, 4, 16)
    wanted = [7, 11, 2, 19]
    seen = []

    def choose(logits: torch.Tensor, k: int) -> torch.Tensor:
        seen.append(logits[0])
        return torch.tensor([wanted[k]])

    tokens, _ = model.rollout(h, torch.tensor([30]), choose)
    assert tokens[0].tolist() == model.draft_to_target[wanted].tolist()
    previous = torch.tensor([[30, *tokens[0, :-1].tolist()]])
    mixed = model.markov_head.mix_all(model.markov_head.embed(previous), h)
    teacher_forced = model.base_logits(h) + model.markov_head.bias(mixed)
    torch.testing.assert_close(torch.stack(seen), teacher_forced[0])
