"""The output distribution of every sampler with every verify-length rule, by exact enumeration.

A round is drafted, scheduled and verified by the shipped functions; V = 3, γ = 2. Allowed pairs must
reproduce the target to 1e-6. Pairs that dspark-spec.md calls biased must show it, and must be refused.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from exhaustive import EveryOutcome, distribution

from dspark_ray.config import Exactness
from dspark_ray.decoding.acceptance import Verdict, verify_coupled, verify_ratio
from dspark_ray.decoding.calibration import survivals
from dspark_ray.decoding.prefix_scheduler import (
    LengthRule,
    StepCurve,
    admit_top,
    check_lossless,
    schedule,
    throughput_budget,
)
from dspark_ray.decoding.sampling import probabilities
from dspark_ray.errors import ExactnessError

V, BLOCK, HORIZON = 3, 2, 3
Prefix = tuple[int, ...]

# The neighbour in the batch competes for the same budget; its survivals do not depend on our tokens.
NEIGHBOUR = [0.3, 0.1]
SMOOTH = StepCurve((2, 3, 4, 5, 6), (1.0, 1.2, 1.5, 2.0, 2.6))
# A dip that only the sum of both drafts is worth crossing: where the same-step optimum looks ahead.
JAGGED = StepCurve((2, 3, 4, 5, 6), (1.0, 1.45, 1.45, 1.45, 1.6))


def table(kind: str, prefix: Prefix, sharpness: float) -> torch.Tensor:
    """Logits [V] that depend on the whole prefix."""
    seed = sum((token + 1) * 7 ** (i + 1) for i, token in enumerate(prefix)) * 10 + len(kind)
    return torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * sharpness


@cache
def target_probs(prefix: Prefix, grammar: bool = False) -> torch.Tensor:
    logits = table("target", prefix, 1.2)
    if grammar:
        logits[2] = float("-inf")
    return probabilities(logits, 0.9, top_p=0.95)


@cache
def draft_probs(prefix: Prefix) -> torch.Tensor:
    return probabilities(table("draft", prefix, 1.0), 0.8, min_p=0.05)


def confidence_logit(prefix: Prefix) -> float:
    """Strongly different for different prefixes, so that any look at a token shows."""
    return float(table("confidence", prefix, 2.5)[0])


class Round:
    """What a verify-length rule can see of one drafted block."""

    def __init__(self, context: Prefix, drafts: Prefix, *, reads_draft: bool = False):
        self.context, self.drafts = context, drafts
        seen = [context + drafts[: k + 1 if reads_draft else k] for k in range(BLOCK)]
        self.survival = survivals([confidence_logit(prefix) for prefix in seen]).tolist()

    @property
    def batch(self) -> list[list[float]]:
        return [self.survival, NEIGHBOUR]


CAUSAL_RULES: dict[str, tuple[LengthRule, Callable[[Round], int]]] = {
    "none": ("fixed_len", lambda r: schedule(r.batch, mode="fixed_len", fixed_len=0)[0]),
    "one": ("fixed_len", lambda r: schedule(r.batch, mode="fixed_len", fixed_len=1)[0]),
    "all": ("fixed_len", lambda r: schedule(r.batch, mode="fixed_len")[0]),
    "fixed_tau": ("survival_threshold", lambda r: schedule(r.batch, mode="fixed_tau", tau=0.3)[0]),
    "tau": ("survival_threshold", lambda r: schedule(r.batch, mode="tau", tau=0.6, min_verify_len=1)[0]),
    "throughput": (
        "causal_throughput",
        lambda r: schedule(r.batch, mode="throughput", step_curve=SMOOTH, extra_tokens=0)[0],
    ),
    "throughput, jagged": (
        "causal_throughput",
        lambda r: schedule(r.batch, mode="throughput", step_curve=JAGGED)[0],
    ),
    "tau+throughput": (
        "causal_throughput",
        lambda r: schedule(r.batch, mode="tau+throughput", tau=0.2, step_curve=SMOOTH)[0],
    ),
    "delayed budget": (
        "delayed_budget",
        lambda r: schedule(
            r.batch,
            mode="throughput",
            step_curve=JAGGED,
            # Known from the context, as confidences of earlier rounds are.
            budget=throughput_budget(
                [survivals([confidence_logit(r.context)] * 2).tolist(), NEIGHBOUR], JAGGED
            ),
        )[0],
    ),
}


def _own_probability(r: Round) -> int:
    own = [float(draft_probs(r.context + r.drafts[:k])[r.drafts[k]]) for k in range(BLOCK)]
    return next((k for k, p in enumerate(own) if p < 0.4), BLOCK)


TOKEN_DEPENDENT_RULES: dict[str, tuple[LengthRule, Callable[[Round], int]]] = {
    "same_step_optimum": (
        "same_step_optimum",
        lambda r: admit_top(r.batch, throughput_budget(r.batch, JAGGED))[0],
    ),
    "own_probability": ("own_probability", _own_probability),
    "grammar": ("grammar_on_draft", lambda r: next((k for k, x in enumerate(r.drafts) if x == 2), BLOCK)),
    "skip": ("skip_after_confidence", lambda r: BLOCK if r.survival[-1] > 0.25 else 0),
}

SAMPLERS: dict[str, tuple[Exactness, bool]] = {
    "coupled, argmax drafts": ("coupled", False),
    "coupled, sampled drafts": ("coupled", True),
    "ratio, argmax drafts": ("ratio", False),
    "ratio, sampled drafts": ("probabilistic", True),
}


def one_round(
    chance: EveryOutcome,
    context: Prefix,
    sampler: str,
    rule: Callable[[Round], int],
    *,
    reads_draft: bool = False,
    grammar: bool = False,
    one_hot_below: float = 0.0,
) -> Prefix:
    exactness, sampled = SAMPLERS[sampler]
    drafts: Prefix = ()
    for k in range(BLOCK):
        q = draft_probs(context + drafts)
        drafts += (chance.draws(q, len(context) + k) if sampled else int(q.argmax()),)
    length = rule(Round(context, drafts, reads_draft=reads_draft))
    rows = torch.stack([target_probs(context + drafts[:k], grammar) for k in range(length + 1)])
    drawn_from = torch.stack([draft_probs(context + drafts[:k]) for k in range(BLOCK)])
    for k, token in enumerate(drafts):
        if drawn_from[k, token] < one_hot_below:
            drawn_from[k] = torch.eye(V)[token]
    anchor = len(context) - 1
    verdict: Verdict
    if exactness == "coupled":
        verdict = verify_coupled(rows, drafts[:length], anchor, target=chance)
    else:
        verdict = verify_ratio(
            rows,
            drafts[:length],
            drawn_from if sampled else None,
            anchor,
            acceptance=chance,
            replacement=chance,
        )
    return (*drafts[: verdict.accept_len], verdict.next_token_id)


def bias(round_of: Callable[[EveryOutcome, Prefix], Prefix], *, grammar: bool = False) -> float:
    """Largest error of the joint probability of the next three tokens, over as many rounds as it takes."""

    @cache
    def joint(context: Prefix, wanted: int) -> dict[Prefix, float]:
        totals: dict[Prefix, float] = {}
        for emitted, weight in distribution(lambda chance: round_of(chance, context)).items():
            head = emitted[:wanted]
            rest = joint(context + head, wanted - len(head)) if len(head) < wanted else {(): 1.0}
            for tail, p in rest.items():
                totals[head + tail] = totals.get(head + tail, 0.0) + weight * p
        return totals

    start: Prefix = (0,)
    got = joint(start, HORIZON)
    error = 0.0
    for tokens in itertools.product(range(V), repeat=HORIZON):
        expected = 1.0
        for k, token in enumerate(tokens):
            expected *= float(target_probs(start + tokens[:k], grammar)[token])
        error = max(error, abs(expected - got.get(tokens, 0.0)))
    return error


@pytest.mark.parametrize("rule", CAUSAL_RULES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_allowed_pairs_reproduce_the_target(sampler: str, rule: str):
    name, length = CAUSAL_RULES[rule]
    exactness, sampled = SAMPLERS[sampler]
    check_lossless(exactness, sampled_drafts=sampled, confidence_head_type="linear", length_rules=[name])
    assert bias(lambda chance, context: one_round(chance, context, sampler, length)) < 1e-6


@pytest.mark.parametrize("rule", TOKEN_DEPENDENT_RULES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_rule_that_sees_the_token_is_exact_or_refused(sampler: str, rule: str):
    name, length = TOKEN_DEPENDENT_RULES[rule]
    exactness, sampled = SAMPLERS[sampler]
    grammar = rule == "grammar"
    error = bias(
        lambda chance, context: one_round(chance, context, sampler, length, grammar=grammar), grammar=grammar
    )
    if sampler == "ratio, sampled drafts":
        assert error > 1e-3
        with pytest.raises(ExactnessError, match=rf"'probabilistic'.*'{name}'"):
            check_lossless(exactness, sampled_drafts=sampled, length_rules=["fixed_len", name])
    else:
        assert error < 1e-6
        check_lossless(exactness, sampled_drafts=sampled, length_rules=[name])


@pytest.mark.parametrize("rule", ["fixed_tau", "throughput"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_confidence_head_that_reads_the_draft_is_exact_or_refused(sampler: str, rule: str):
    name, length = CAUSAL_RULES[rule]
    exactness, sampled = SAMPLERS[sampler]
    error = bias(lambda chance, context: one_round(chance, context, sampler, length, reads_draft=True))
    if sampler == "ratio, sampled drafts":
        assert error > 1e-3
        with pytest.raises(ExactnessError, match=r"'probabilistic'.*'mlp'"):
            check_lossless(exactness, sampled_drafts=sampled, confidence_head_type="mlp", length_rules=[name])
    else:
        assert error < 1e-6
        check_lossless(exactness, sampled_drafts=sampled, confidence_head_type="mlp", length_rules=[name])


def test_a_fallback_to_one_hot_q_for_unlikely_sampled_tokens_is_biased_and_refused():
    def bias_of(one_hot_below: float) -> float:
        return bias(
            lambda chance, context: one_round(
                chance,
                context,
                "ratio, sampled drafts",
                CAUSAL_RULES["all"][1],
                one_hot_below=one_hot_below,
            )
        )

    assert bias_of(0.4) > 1e-3
    # One-hot q for all is exact: given the token, the rule yields p. The choice by token is the fault.
    assert bias_of(1.1) < 1e-6
    with pytest.raises(ExactnessError, match="'ratio' with sampled drafts and scored_q 'one_hot_fallback'"):
        check_lossless("ratio", sampled_drafts=True, scored_q="one_hot_fallback")


def test_a_head_that_reads_the_draft_may_be_there_when_lengths_are_fixed():
    check_lossless("probabilistic", confidence_head_type="mlp", length_rules=["fixed_len"])


@pytest.mark.parametrize(
    ("q", "p", "admit", "expected"),
    [
        ((0.5, 0.5), (0.7, 0.3), lambda x, q: x == 0, (0.85, 0.15)),
        ((0.6, 0.4), (0.5, 0.5), lambda x, q: q[x] >= 0.5, (0.7, 0.3)),
    ],
    ids=["admit only token A", "drop a token whose own q is small"],
)
def test_worked_biases(q: Sequence[float], p: Sequence[float], admit: Callable, expected: Sequence[float]):
    q_row, p_row = torch.tensor(q), torch.tensor(p)

    def run(chance: EveryOutcome) -> int:
        token = chance.draws(q_row, 1)
        drafts = [token] if admit(token, q) else []
        verdict = verify_ratio(
            torch.stack([p_row, p_row]), drafts, q_row[None], 0, acceptance=chance, replacement=chance
        )
        return drafts[0] if verdict.accept_len else verdict.next_token_id

    assert distribution(run) == pytest.approx(dict(enumerate(expected)), abs=1e-6)
