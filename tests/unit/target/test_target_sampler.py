"""The coupled sampler on tiny vocabularies, against vLLM's plain sampler called token by token."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from dspark_ray.target.coupled_sampler import CoupledRejectionSampler
from dspark_ray.target.ratio_mend import expand_batch_to_tokens
from dspark_ray.target.seeding import advance
from dspark_ray.target.slot_processors import carried_parameters

VOCAB = 12
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def eager():
    """vLLM compiles its unseeded draw; for twelve tokens that is all waiting."""
    with torch.compiler.set_stance("force_eager"):
        yield


def target_logits(tokens: list[int]) -> torch.Tensor:
    """A made-up target: its logits depend on the last two tokens."""
    torch.manual_seed(sum((i + 1) * 37 * t for i, t in enumerate(tokens[-2:])))
    return 2 * torch.randn(VOCAB)


class Setting:
    """Sampling parameters of one request."""

    def __init__(self, dice: random.Random):
        self.temperature = dice.choice([0.0, 0.7, 1.0, 1.5])
        self.seed = dice.randrange(1000) if dice.random() < 0.8 and self.temperature else None
        self.top_k, self.top_p = dice.choice([VOCAB, 3, 6]), dice.choice([1.0, 0.6])
        self.penalty = dice.choice([0.0, 0.0, 0.8])
        self.bad_words = dice.choice([[], [[3]], [[1, 2]]])
        self.output: list[int] = [dice.randrange(VOCAB)]
        self.generator = None
        if self.seed is not None:
            self.generator = torch.Generator().manual_seed(self.seed)


def metadata_of(settings_: list[Setting], drafts: list[list[int]] | None) -> SamplingMetadata:
    temperatures = torch.tensor([s.temperature for s in settings_])
    any_penalty = any(s.penalty for s in settings_)
    outputs_needed = any_penalty or any(s.bad_words for s in settings_)
    return SamplingMetadata(
        temperature=None if not temperatures.any() else temperatures,
        all_greedy=not temperatures.any(), all_random=bool(temperatures.all()),
        top_p=torch.tensor([s.top_p for s in settings_]),
        top_k=torch.tensor([s.top_k for s in settings_], dtype=torch.int32),
        generators={i: s.generator for i, s in enumerate(settings_) if s.generator is not None},
        max_num_logprobs=2, no_penalties=not any_penalty,
        prompt_token_ids=torch.full((len(settings_), 1), VOCAB - 1),
        frequency_penalties=torch.tensor([s.penalty for s in settings_]),
        presence_penalties=torch.tensor([s.penalty / 2 for s in settings_]),
        repetition_penalties=torch.tensor([1 + s.penalty for s in settings_]),
        output_token_ids=[s.output for s in settings_] if outputs_needed else [],
        allowed_token_ids_mask=None,
        bad_words_token_ids={i: s.bad_words for i, s in enumerate(settings_) if s.bad_words},
        logitsprocs=LogitsProcessors(), spec_token_ids=drafts,
    )  # fmt: skip


def spec_metadata(drafts: list[list[int]]) -> SpecDecodeMetadata:
    flat = [token for own in drafts for token in own]
    counts = [len(own) for own in drafts]
    unused = torch.zeros(0, dtype=torch.int32)
    return SpecDecodeMetadata(
        draft_token_ids=torch.tensor(flat, dtype=torch.int32), num_draft_tokens=counts,
        cu_num_draft_tokens=torch.tensor(counts).cumsum(0), cu_num_sampled_tokens=unused,
        target_logits_indices=unused, bonus_logits_indices=unused, logits_indices=unused,
    )  # fmt: skip


def plain(settings_: list[Setting], length: int):
    """Token by token; returns the tokens and the logprobs of each."""
    sampler, logprobs = Sampler(), [[] for _ in settings_]
    for _ in range(length):
        logits = torch.stack([target_logits(s.output) for s in settings_])
        out = sampler(logits=logits, sampling_metadata=metadata_of(settings_, None))
        for i, s in enumerate(settings_):
            s.output.append(int(out.sampled_token_ids[i, 0]))
            logprobs[i].append(out.logprobs_tensors.logprobs[i].tolist())
    return logprobs


def speculative(settings_: list[Setting], truth: list[list[int]], length: int, dice: random.Random):
    """With drafts that are right for a while and then are not."""
    sampler = CoupledRejectionSampler(Sampler())
    logprobs, accepted = [[] for _ in settings_], 0
    while any(len(s.output) <= length for s in settings_):
        drafts = []
        for s, wanted in zip(settings_, truth, strict=True):
            count, right = dice.randint(0, 5), dice.randint(0, 5)
            ahead = wanted[len(s.output) :][: min(count, right)]
            drafts.append(ahead + [dice.randrange(VOCAB) for _ in range(count - len(ahead))])
        if not any(drafts):
            drafts[0] = [dice.randrange(VOCAB)]
        logits = [
            target_logits(s.output + own[:slot]) for s, own in zip(settings_, drafts, strict=True)
            for slot in range(len(own) + 1)
        ]  # fmt: skip
        out = sampler(spec_metadata(drafts), None, torch.stack(logits), metadata_of(settings_, drafts))
        mask = out.sampled_token_ids.flatten() != -1
        rows = iter(out.logprobs_tensors.filter(mask).logprobs.tolist())
        for i, s in enumerate(settings_):
            emitted = [t for t in out.sampled_token_ids[i].tolist() if t != -1]
            accepted += len(emitted) - 1
            s.output += emitted
            logprobs[i] += [next(rows) for _ in emitted]
    return logprobs, accepted


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_seeded_and_greedy_output_is_plain_decoding_whatever_the_drafts(seed: int, requests: int):
    """Breaks when a generator is not set back, is set back wrongly, or a slot is processed otherwise."""
    length = 12
    dice = random.Random(seed)
    reference = [Setting(random.Random(seed + i)) for i in range(requests)]
    again = [Setting(random.Random(seed + i)) for i in range(requests)]
    reference_logprobs = plain(reference, length)
    logprobs, _ = speculative(again, [s.output for s in reference], length, dice)
    for i, (wanted, got) in enumerate(zip(reference, again, strict=True)):
        if wanted.temperature and wanted.seed is None:
            continue
        assert got.output[: length + 1] == wanted.output
        for a, b in zip(reference_logprobs[i], logprobs[i], strict=False):
            assert a == pytest.approx(b, abs=1e-5)


def test_drafts_that_are_right_are_accepted():
    reference, again = (
        [Setting(random.Random(s)) for s in range(40) if Setting(random.Random(s)).seed is not None]
        for _ in "ab"
    )
    plain(reference, 20)
    _, accepted = speculative(again, [s.output for s in reference], 20, random.Random(1))
    assert accepted > 4 * len(again)


@pytest.mark.parametrize("draft", [0, 1])
def test_an_unseeded_draw_is_distributed_as_the_target_says(draft: int):
    """Worked value: p = (.7, .3) with a fixed draft gives .70; a fresh draw on mismatch would give .49 or .91."""
    count = 4000
    torch.manual_seed(11)
    one = Setting(random.Random(0))
    one.temperature, one.generator, one.top_k, one.top_p, one.penalty, one.bad_words = (
        1.0,
        None,
        VOCAB,
        1.0,
        0.0,
        [],
    )
    logits = torch.full((VOCAB,), -torch.inf)
    logits[:2] = torch.tensor([0.7, 0.3]).log()
    drafts = [[draft]] * count
    out = CoupledRejectionSampler(Sampler())(
        spec_metadata(drafts), None, logits.expand(2 * count, -1).clone(), metadata_of([one] * count, drafts)
    )
    share = (out.sampled_token_ids[:, 0] == 0).double().mean().item()
    assert share == pytest.approx(0.7, abs=4 * (0.7 * 0.3 / count) ** 0.5)
    bonus = out.sampled_token_ids[:, 1]
    assert torch.equal(bonus != -1, out.sampled_token_ids[:, 0] == draft)
    assert (bonus[bonus != -1] == 0).double().mean().item() == pytest.approx(0.7, abs=0.05)


def test_parameters_are_repeated_over_draft_rows():
    """vLLM's own CPU kernel leaves them uninitialised, which is why ours replaces it."""
    got = expand_batch_to_tokens(torch.tensor([0.0, 0.7, 1.3]), torch.tensor([2, 2, 5]), 5, 0, 1)
    assert got.tolist() == pytest.approx([1.0, 1.0, 1.3, 1.3, 1.3])


@pytest.mark.parametrize(
    "extra",
    [
        {"dspark_logit_bias": [1, 2.0, 3]},
        {"dspark_logit_bias": [VOCAB, 1.0]},
        {"dspark_logit_bias": "x"},
        {"dspark_min_p": 1.5},
        {"dspark_min_p": "nan"},
    ],
)
def test_malformed_carried_parameters_do_not_reach_the_engine(extra):
    read = carried_parameters(extra, VOCAB)
    assert (read.logit_bias, read.min_p) == (None, 0.0)


def test_carried_parameters():
    read = carried_parameters({"dspark_logit_bias": [3, -100, 4, 2.5], "dspark_min_p": 0.1}, VOCAB)
    assert read.logit_bias == {3: -100.0, 4: 2.5}
    assert read.min_p == 0.1


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("vocab", [32, 49_152])
def test_a_generator_advanced_by_k_draws_is_where_the_sampler_leaves_it_after_k_tokens(rows: int, vocab: int):
    sampler = TopKTopPSampler()
    sampled, advanced = (torch.Generator().manual_seed(5) for _ in range(2))
    for _ in range(7):
        sampler(torch.randn(rows, vocab), {rows - 1: sampled}, None, None)
    assert not torch.equal(sampled.get_state(), advanced.get_state())
    advance(advanced, 7, vocab)
    assert torch.equal(sampled.get_state(), advanced.get_state())
