"""The acceptance rules on the worked values of dspark-spec.md section 3, by exact enumeration (fault 11)."""

import pytest
import torch
from exhaustive import EveryOutcome, distribution

from dspark_ray.decoding.acceptance import (
    SeededChance,
    matching_prefix_len,
    residual,
    verify_coupled,
    verify_ratio,
)
from dspark_ray.decoding.sampling import probabilities


def first_token(p: list[float], drawn_from: torch.Tensor | int, scored_q: torch.Tensor | None) -> list[float]:
    """Distribution of the next token for a draft drawn from a distribution (or given), scored with q."""
    p_rows = torch.tensor([p, p])

    def run(chance: EveryOutcome) -> int:
        token = drawn_from if isinstance(drawn_from, int) else chance.draws(drawn_from, 1)
        q_rows = None if scored_q is None else scored_q[None]
        verdict = verify_ratio(p_rows, [token], q_rows, 0, acceptance=chance, replacement=chance)
        return token if verdict.accept_len else verdict.next_token_id

    found = distribution(run)
    return [found.get(token, 0.0) for token in range(len(p))]


def test_q_is_what_was_drawn_from_after_filters():
    raw = torch.tensor([0.5, 0.3, 0.2])
    filtered = probabilities(raw.log(), top_k=2)
    assert first_token([0.5, 0.5, 0.0], filtered, filtered) == pytest.approx([0.5, 0.5, 0.0], abs=1e-6)
    # The fault: scoring with the raw q.
    assert first_token([0.5, 0.5, 0.0], filtered, raw) == pytest.approx([0.625, 0.375, 0.0], abs=1e-6)


def test_argmax_drafts_have_a_one_hot_q():
    p, q = [0.4, 0.4, 0.2], torch.tensor([0.5, 0.3, 0.2])
    assert first_token(p, int(q.argmax()), None) == pytest.approx(p, abs=1e-6)
    # The fault: scoring with the softmax.
    assert first_token(p, int(q.argmax()), q) == pytest.approx([0.8, 0.2, 0.0], abs=1e-6)


def test_coupled_emits_the_very_draw_that_did_not_match():
    p, q = torch.tensor([[0.7, 0.3], [0.7, 0.3]]), torch.tensor([0.8, 0.2])

    def coupled(chance: EveryOutcome) -> int:
        token = chance.draws(q, 0)
        verdict = verify_coupled(p, [token], 0, target=chance)
        return token if verdict.accept_len else verdict.next_token_id

    def fresh_draw(chance: EveryOutcome) -> int:
        token = chance.draws(q, 0)
        return token if verify_coupled(p, [token], 0, target=chance).accept_len else chance.draws(p[0], 1)

    assert distribution(coupled)[0] == pytest.approx(0.7, abs=1e-6)
    assert distribution(fresh_draw)[0] == pytest.approx(0.826, abs=1e-6)


def test_draft_and_residual_with_common_noise_are_biased():
    # Keyed by position alone, one noise serves two draws of a round; streams of SeededChance keep them apart.
    p, q = torch.tensor([0.0, 0.35, 0.65]), torch.tensor([0.6, 0.2, 0.2])
    counts = {"one stream": torch.zeros(3), "two streams": torch.zeros(3)}
    for seed in range(8000):
        draft = SeededChance(seed, "draft")
        for name, other in (("one stream", draft), ("two streams", SeededChance(seed, "replacement"))):
            token = draft.draws(q, 1)
            verdict = verify_ratio(
                torch.stack([p, p]),
                [token],
                q[None],
                0,
                acceptance=SeededChance(seed, "acceptance"),
                replacement=other,
            )
            counts[name][token if verdict.accept_len else verdict.next_token_id] += 1
    error = {name: float((count / 8000 - p).abs().max()) for name, count in counts.items()}
    assert error["two streams"] < 0.015
    assert error["one stream"] > 0.03  # 0.043 in the limit


def test_nothing_verified_draws_from_the_target_and_a_full_block_adds_a_bonus():
    chance = EveryOutcome([])
    rows = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    none = verify_ratio(rows[:1], [], None, 4, acceptance=chance, replacement=chance)
    assert (none.accept_len, none.next_token_id) == (0, 1)
    for verdict in (
        verify_ratio(rows, [1], None, 4, acceptance=chance, replacement=chance),
        verify_coupled(rows, [1], 4, target=chance),
    ):
        assert (verdict.accept_len, verdict.next_token_id) == (1, 2)


def test_residual_without_mass_is_the_target():
    p = torch.tensor([0.25, 0.75])
    assert torch.equal(residual(p, p + 1e-9), p)


def test_a_seeded_draw_depends_on_seed_stream_and_position_alone():
    probs = torch.full((1000,), 1e-3)
    alone = SeededChance(7, "target").draws(probs, 12)
    chance = SeededChance(7, "target")
    for position in (3, 99, 5):  # what a batch, a longer draft or a retry would have drawn before
        chance.draws(probs, position)
    assert chance.draws(probs, 12) == alone
    others = {
        SeededChance(s, t).draws(probs, n)
        for s, t, n in ((8, "target", 12), (7, "draft", 12), (7, "target", 13))
    }
    assert alone not in others


def test_acceptance_follows_its_probability():
    accepted = sum(SeededChance(seed, "acceptance").accepts(0.3, 5) for seed in range(8000))
    assert accepted / 8000 == pytest.approx(0.3, abs=0.03)


def test_matching_prefix_of_ragged_rows():
    drafts = torch.tensor([[4, 5, 6], [4, 5, -1], [9, 5, 6], [-1, -1, -1]])
    target = torch.tensor([[4, 5, 6, 1], [4, 5, -1, 1], [4, 5, 6, 1], [4, 5, 6, 1]])
    assert matching_prefix_len(drafts, target).tolist() == [3, 2, 0, 0]
