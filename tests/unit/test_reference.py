"""The one-page decoder against plain decoding of the demo model, fp32, with random-weight drafters."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from dspark_ray.drafter.checkpoint import load_drafter, save_drafter
from dspark_ray.drafter.model import DraftConfig, DSparkModel
from dspark_ray.drafter.runner import DraftRunner
from dspark_ray.errors import ExactnessError
from dspark_ray.reference import Decoding, HFTarget, Tally, build_runner, generate_command, speculate

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ROOT / "tests" / "data" / "eval_slice.jsonl"
TRAINED = ROOT / "deployments" / "drafters" / "smollm2-135m"


class Scripted:
    """Stands in for a runner: drafts the true continuation, with a wrong token at every n-th position."""

    def __init__(self, runner: DraftRunner, prompt_len: int, truth: Sequence[int], wrong_every: int):
        self.model, self._runner = runner.model, runner
        self._prompt_len, self._truth, self._wrong_every = prompt_len, truth, wrong_every

    def draft(self, items: Sequence[Any], **options: Any) -> Any:
        result = self._runner.draft(items, **options)
        (item,) = items
        drafts = result.draft_token_ids.clone()
        first = item.base_position + len(item.features) + 1 - self._prompt_len
        for k, at in enumerate(range(first, first + item.draft_len)):
            token = self._truth[at] if at < len(self._truth) else 0
            drafts[0, k] = token if at % self._wrong_every else token + 1
        return replace(result, draft_token_ids=drafts)


@pytest.fixture(scope="module")
def language_model(demo_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model)


@pytest.fixture(scope="module")
def drafter(language_model: Any) -> DSparkModel:
    """A drafter of the demo target's shape whose weights mean nothing."""
    target = language_model.config
    config = DraftConfig(
        hidden_size=target.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        intermediate_size=256,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        block_size=5,
        mask_token_id=3,
        target_layer_ids=(3, 14, 26),
        num_target_layers=target.num_hidden_layers,
        target_hidden_size=target.hidden_size,
        markov_rank=16,
        enable_confidence_head=True,
    )
    torch.manual_seed(0)
    model = DSparkModel(config)
    embedding = language_model.get_input_embeddings().weight
    model.attach_target(embedding, embedding)
    return model.eval()


def prompts(count: int) -> list[str]:
    lines = PROMPTS.read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines[:: len(lines) // count][:count]]


def encode(tokenizer: Any, prompt: str) -> list[int]:
    chat = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def plain(language_model: Any, ids: list[int], how: Decoding) -> list[int]:
    return [t for block in speculate(HFTarget(language_model, None), None, ids, how, Tally()) for t in block]


def speculative(language_model: Any, runner: Any, ids: list[int], how: Decoding) -> tuple[list[int], Tally]:
    tally = Tally()
    blocks = speculate(HFTarget(language_model, runner.model), runner, ids, how, tally)
    return [t for block in blocks for t in block], tally


def check_greedy_equality(
    language_model: Any, tokenizer: Any, drafter: DSparkModel, texts: list[str], tokens: int
):
    for text in texts:
        ids = encode(tokenizer, text)
        how = Decoding(max_new_tokens=tokens, stop_token_ids={tokenizer.eos_token_id})
        expected = plain(language_model, ids, how)
        assert speculative(language_model, build_runner(drafter), ids, how)[0] == expected
        # A random drafter is hardly ever right: a scripted one is, so that accepted prefixes are tested too.
        scripted = Scripted(build_runner(drafter), len(ids), expected, wrong_every=4)
        got, tally = speculative(language_model, scripted, ids, how)
        assert got == expected
        assert tally.accept_length > 2 or len(expected) < 8


def test_plain_decoding_is_the_models_own_greedy_decoding(language_model: Any, tokenizer: Any):
    ids = encode(tokenizer, prompts(6)[2])
    own = language_model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=24, do_sample=False
    )
    how = Decoding(max_new_tokens=24, stop_token_ids={tokenizer.eos_token_id})
    assert plain(language_model, ids, how) == own[0, len(ids) :].tolist()


def test_greedy_output_is_that_of_plain_decoding(language_model: Any, tokenizer: Any, drafter: DSparkModel):
    check_greedy_equality(language_model, tokenizer, drafter, prompts(6), 20)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_greedy_output_is_that_of_plain_decoding_on_50_prompts(
    language_model: Any, tokenizer: Any, drafter: DSparkModel
):
    check_greedy_equality(language_model, tokenizer, drafter, prompts(50), 40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_trained_drafter_says_what_plain_decoding_says(
    language_model: Any, tokenizer: Any, demo_model: Path
):
    trained = load_drafter(TRAINED, target=demo_model, dtype=torch.float32)
    accepted = []
    for text in prompts(50):
        ids = encode(tokenizer, text)
        how = Decoding(max_new_tokens=40, stop_token_ids={tokenizer.eos_token_id})
        got, tally = speculative(language_model, build_runner(trained), ids, how)
        assert got == plain(language_model, ids, how)
        accepted += tally.accept_lens
    assert sum(accepted) / len(accepted) > 0.3  # it was trained for this target, and helps


def test_seeded_sampling_does_not_depend_on_the_drafts(
    language_model: Any, tokenizer: Any, drafter: DSparkModel
):
    ids = encode(tokenizer, prompts(6)[5])
    how = Decoding(max_new_tokens=32, temperature=0.8, top_p=0.9, seed=11)
    expected = plain(language_model, ids, how)
    got, _ = speculative(language_model, build_runner(drafter), ids, how)
    scripted, tally = speculative(
        language_model, Scripted(build_runner(drafter), len(ids), expected, wrong_every=5), ids, how
    )
    assert got == scripted == expected
    assert tally.accept_length > 2
    assert (
        plain(language_model, ids, Decoding(max_new_tokens=32, temperature=0.8, top_p=0.9, seed=12))
        != expected
    )


@pytest.mark.parametrize("exactness", ["ratio", "probabilistic"])
def test_the_ratio_rule_decodes_too(
    language_model: Any, tokenizer: Any, drafter: DSparkModel, exactness: Any
):
    ids = encode(tokenizer, prompts(6)[4])
    # At this temperature the target is all but greedy, so that both rules must say what greedy decoding says.
    how = Decoding(max_new_tokens=16, temperature=0.001, exactness=exactness, mode="fixed_tau", tau=0.2)
    got, tally = speculative(language_model, build_runner(drafter), ids, how)
    assert got == plain(language_model, ids, Decoding(max_new_tokens=16))
    assert max(tally.verify_lens) > 0


def test_features_and_positions_stay_in_step(language_model: Any, tokenizer: Any, drafter: DSparkModel):
    """Fault 10, end to end: after accepts and rejects a draft equals that of a fresh runner."""
    ids = encode(tokenizer, prompts(6)[1])
    how = Decoding(max_new_tokens=20)
    expected = plain(language_model, ids, how)
    runner = build_runner(drafter)
    seen = []
    scripted = Scripted(runner, len(ids), expected, wrong_every=3)
    real = runner.draft
    runner.draft = lambda items, **kw: (
        seen.append((items[0], real(items, return_hidden=True, **kw))) or seen[-1][1]
    )
    speculative(language_model, scripted, ids, how)
    assert len(seen) > 4
    _, features = HFTarget(language_model, drafter).extend([*ids, *expected])
    for item, result in seen[1:]:
        position = item.base_position + len(item.features)
        assert item.anchor_token_id == expected[position - len(ids)]
        fresh = type(item)("fresh", 0, features[:position], item.anchor_token_id, item.draft_len, True)
        again = build_runner(drafter).draft([fresh], return_hidden=True)
        n = item.draft_len
        torch.testing.assert_close(result.hidden[0, :n], again.hidden[0, :n], atol=1e-3, rtol=1e-3)


def test_context_features_come_from_the_output_of_the_named_layers(language_model: Any, drafter: DSparkModel):
    """Fault 6 at the target: layer l (from 0) is tapped behind it, in the order of the ids."""
    outputs: list[torch.Tensor] = []
    hooks = [
        language_model.model.layers[layer].register_forward_hook(
            lambda module, args, out: outputs.append(out[0] if isinstance(out, tuple) else out)
        )
        for layer in drafter.config.target_layer_ids
    ]
    try:
        _, features = HFTarget(language_model, drafter).extend([5, 6, 7, 8])
    finally:
        for hook in hooks:
            hook.remove()
    taps = torch.cat([out.reshape(4, -1) for out in outputs], dim=-1)
    torch.testing.assert_close(features, drafter.project(taps))


def test_the_contexts_end_is_reached_and_not_passed(
    language_model: Any, tokenizer: Any, drafter: DSparkModel
):
    """Fault 20: the last positions are decoded, and nothing stands beyond them."""
    ids = encode(tokenizer, prompts(6)[0])
    how = Decoding(max_new_tokens=500, max_model_len=len(ids) + 12)
    expected = plain(language_model, ids, how)
    assert len(expected) == 12  # positions len(ids)..len(ids)+11
    scripted = Scripted(build_runner(drafter), len(ids), expected, wrong_every=100)
    got, tally = speculative(language_model, scripted, ids, how)
    assert got == expected
    assert tally.verify_lens == [5, 4]


def test_sampled_drafts_with_a_head_that_reads_them_are_refused(language_model: Any, drafter: DSparkModel):
    config = DraftConfig(**{**drafter.config.model_dump(), "confidence_head_type": "mlp"})
    model = DSparkModel(config)
    model.attach_target(drafter.embed_weight, drafter.lm_head_weight)
    how = Decoding(exactness="probabilistic", mode="fixed_tau", tau=0.5)
    with pytest.raises(ExactnessError, match="mlp"):
        next(speculate(HFTarget(language_model, model), build_runner(model), [1, 2], how, Tally()))


def test_generate_streams_the_answer_and_its_figures(demo_model: Path, drafter: DSparkModel, tmp_path: Path):
    save_drafter(drafter, tmp_path)
    result = CliRunner().invoke(
        generate_command,
        [
            "--target",
            str(demo_model),
            "--drafter",
            str(tmp_path),
            "--prompt",
            "Tell me a story.",
            "--max-new-tokens",
            "12",
        ],
    )
    assert result.exit_code == 0, result.output
    assert "12 tokens in" in result.output
    assert "accept length" in result.output
    assert "same text" in result.output
