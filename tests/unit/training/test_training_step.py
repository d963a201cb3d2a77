"""A step of training: what its loss is made of, what has a gradient, and that every piece is in its place."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from tiny_training import load_target, run_config

from dspark_ray.errors import ConfigError
from dspark_ray.training.config import LossConfig, LossWeights, OptimizerConfig
from dspark_ray.training.data import (
    Example,
    anchor_positions,
    covered_share,
    frequent_tokens,
    load_examples,
    make_batch,
    split_held_out,
    step_examples,
)
from dspark_ray.training.frozen_target import FeatureCache, TargetFeatures
from dspark_ray.training.losses import position_weights
from dspark_ray.training.step import batch_loss, slot_weight_sum
from dspark_ray.training.trainer import Trainer, learning_rate, loss_weights

LOSS = LossConfig(position_decay=4.0)
WEIGHTS = LossWeights(ce=0.2, kl=0.5, tv=0.7)


@pytest.fixture(scope="module")
def trainer(target: Path, answers: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    config = run_config(target, tmp_path_factory.mktemp("run"), answers, draft={"draft_vocab_size": 30})
    made = Trainer(config)
    torch.manual_seed(4)
    for parameter in made.parameters:  # zero weights would hide mistakes
        parameter.data += 0.05 * torch.randn_like(parameter)
    return made


def test_loss_equals_its_definition_slot_by_slot(trainer: Trainer, target: Path) -> None:
    """Faults 1-3: teacher, data token, previous token and weight of every slot, one slot at a time."""
    model, reference = trainer.model, load_target(target)
    batch = make_batch(trainer.examples[:2], 4, limit=5, seed=1)
    captured = trainer.features.of(batch)
    denominator = slot_weight_sum(batch, 4.0)
    loss, sums = batch_loss(model, batch, captured, LOSS, WEIGHTS, denominator, trainer.to_draft)

    expected, accepted = torch.zeros(()), torch.zeros(4)
    for row, example in enumerate(trainer.examples[:2]):
        ids = example.ids.tolist()
        out = reference(input_ids=example.ids[None], output_hidden_states=True, use_cache=False)
        taps = torch.cat([out.hidden_states[1], out.hidden_states[3]], dim=-1)[0]
        for anchor in batch.anchors[row].tolist():
            positions = torch.arange(anchor)[None]
            k, v = model.context_kv(model.project(taps[None, :anchor]), positions)
            at = torch.tensor([[anchor]])
            mask = torch.ones(1, 1, anchor, dtype=torch.bool)
            h = model.block(torch.tensor([[ids[anchor]]]), at, 4, k, v, mask)[0, 0]
            for slot in range(1, 5):
                if anchor + slot >= len(ids):
                    continue
                previous = model.markov_head.embed(torch.tensor(ids[anchor + slot - 1]))
                q = (model.base_logits(h[slot - 1]) + model.markov_head.bias(previous)).softmax(-1)
                p_all = out.logits[0, anchor + slot - 1].softmax(-1)
                p = p_all[model.draft_to_target]
                wanted = int(trainer.to_draft[ids[anchor + slot]])
                ce = -q[wanted].log() if wanted >= 0 else torch.zeros(())
                kl = (p * (p / q).log()).sum()
                tv = (q - p).abs().sum() + 1 - p.sum()
                drafted = model.draft_to_target[q.argmax()]
                label = (drafted == p_all.argmax()).float()
                z = model.confidence_logits(h[slot - 1], previous, drafted)
                bce = torch.nn.functional.binary_cross_entropy_with_logits(z, label)
                weight = torch.exp(torch.tensor(-(slot - 1) / 4)) / denominator
                expected = expected + weight * (0.2 * ce + 0.5 * kl + 0.7 * tv + 1.0 * bce)
                accepted[slot - 1] += label
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sums["greedy"], accepted)


def test_padded_and_dropped_anchors_have_exactly_no_gradient(trainer: Trainer) -> None:
    """Fault 5: the same slots with and without a dropped anchor, a padded sequence and slots past the end."""
    short, long = sorted(trainer.examples, key=lambda example: len(example.ids))[:: len(trainer.examples) - 1]
    batch = make_batch([long, short], 4, limit=6, seed=0)
    dropped = batch.valid.clone()
    dropped[0, 1] = False
    batch = dataclasses.replace(batch, valid=dropped)

    def gradients(anchors: torch.Tensor) -> list[torch.Tensor]:
        changed = dataclasses.replace(batch, anchors=anchors)
        captured = trainer.features.of(changed)
        loss, _ = batch_loss(trainer.model, changed, captured, LOSS, WEIGHTS, 10.0, trainer.to_draft)
        return list(torch.autograd.grad(loss, trainer.parameters))

    moved = batch.anchors.clone()
    moved[0, 1] = batch.anchors[0, 0]  # another anchor in the dropped place changes nothing at all
    for one, other in zip(gradients(batch.anchors), gradients(moved), strict=True):
        assert torch.equal(one, other)
    assert sum(float(g.abs().sum()) for g in gradients(batch.anchors)) > 0


def test_target_ends_get_no_gradient_and_are_no_parameters(trainer: Trainer) -> None:
    names = set(trainer.names)
    assert not any("embed" in name or "lm_head" in name for name in names)
    assert {"projection.fc.weight", "markov_head.markov_w1.weight", "confidence_head.proj.weight"} <= names


def test_gradients_add_up_over_forwards(trainer: Trainer) -> None:
    """One global denominator: a step in one forward equals the same step sequence by sequence."""
    examples = trainer.examples[:4]
    parts = [make_batch([example], 4, limit=128, seed=0) for example in examples]
    whole = make_batch(examples, 4, limit=128, seed=0)
    denominator = slot_weight_sum(whole, 4.0)
    assert denominator == pytest.approx(sum(slot_weight_sum(part, 4.0) for part in parts))

    def loss(batch: object) -> torch.Tensor:
        captured = trainer.features.of(batch)
        return batch_loss(trainer.model, batch, captured, LOSS, WEIGHTS, denominator, trainer.to_draft)[0]

    together = torch.autograd.grad(loss(whole), trainer.parameters)
    apart = torch.autograd.grad(sum(loss(part) for part in parts), trainer.parameters)
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_anchors_and_slots_stay_where_loss_is() -> None:
    example = Example(torch.arange(20), prompt_len=7, temperature=0.0, index=3)
    every = anchor_positions(7, 20, 100, torch.Generator())
    assert every.tolist() == list(range(7, 19))
    batch = make_batch([example], 4, limit=5, seed=0)
    assert len(set(batch.anchors[0].tolist())) == 5
    assert (make_batch([example], 4, limit=5, seed=1).anchors != batch.anchors).any()
    last = make_batch([example], 4, limit=100, seed=0)
    assert last.token_ids[0, 0].tolist() == [7, 8, 9, 10, 11]
    assert last.valid[0, -1].tolist() == [True, False, False, False]
    assert slot_weight_sum(last, 4.0) == pytest.approx(
        9 * float(position_weights(4, 4.0).sum())
        + sum(float(position_weights(k, 4.0).sum()) for k in (3, 2, 1))
    )


def test_epochs_visit_everything_once_and_differ() -> None:
    examples = [Example(torch.arange(9), 2, 0.0, i) for i in range(10)]
    epoch = [[e.index for e in step_examples(examples, step, 3, seed=0)] for step in range(6)]
    assert len({i for step in epoch[:3] for i in step}) == 9
    assert epoch[:3] != epoch[3:]


def test_held_out_prompts_are_not_trained_on() -> None:
    examples = [Example(torch.tensor([i % 5, 9, 1, 1, 1]), 2, 0.0, i) for i in range(20)]
    train, held_out = split_held_out(examples, 4, seed=1)
    assert len(train) + len(held_out) == 20
    assert not {int(e.ids[0]) for e in train} & {int(e.ids[0]) for e in held_out}


def test_draft_vocabulary_is_the_most_frequent_answer_tokens() -> None:
    examples = [Example(torch.tensor([30, 30, 30, 7, 7, 7, 8, 8, 9]), 3, 0.0, 0)]
    ids = frequent_tokens(examples, 3, always=[40])
    assert ids.tolist() == [7, 8, 40]
    assert covered_share(examples, ids) == pytest.approx(5 / 6)


def test_lines_without_answers_are_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt_ids": [1], "response_ids": [5, 6, 7]}) + '\n{"prompt": "x"}\n')
    with pytest.raises(ConfigError, match=r"data\.jsonl:2 has no prompt_ids"):
        load_examples([path], 100)
    with pytest.raises(ConfigError, match=r"data\.files.*absent"):
        load_examples([path.with_name("absent.jsonl")], 100)


def test_cached_features_are_the_targets_own(target: Path, answers: Path, tmp_path: Path) -> None:
    """In bf16 the second epoch sees bit for bit what the first saw; past the bound nothing is kept."""
    trainer = Trainer(run_config(target, tmp_path / "run", answers, compute_dtype="bfloat16"))
    lengths = [len(example.ids) for example in sorted(trainer.examples, key=lambda e: e.index)]
    row_bytes = 2 * (64 + 32) + 8
    bound = row_bytes * (sum(lengths[:3]) + 1)
    cache = FeatureCache(tmp_path / "cache", lengths, 64, 32, bound, "key")
    features = TargetFeatures(trainer.target, cache)
    batches = [make_batch([example], 4, 128, 0) for example in trainer.examples]
    first = [features.of(batch) for batch in batches]
    assert [cache.get(i) is not None for i in range(5)] == [True, True, True, False, False]
    again = FeatureCache(tmp_path / "cache", lengths, 64, 32, bound, "key")  # as after a restart
    for batch, made in zip(batches, first, strict=True):
        kept = again.get(batch.indices[0])
        if kept is not None:
            for field in dataclasses.fields(kept):
                assert torch.equal(getattr(kept, field.name), getattr(made, field.name)), field.name
    with pytest.raises(Exception, match="made from other data"):
        FeatureCache(tmp_path / "cache", lengths, 64, 32, bound, "another")


def test_learning_rate_and_curriculum() -> None:
    optimizer = OptimizerConfig(lr=2e-3, steps=100, warmup_fraction=0.1, decay_fraction=0.5)
    rates = [learning_rate(step, optimizer) for step in range(100)]
    assert max(rates) == 2e-3
    assert rates[0] == pytest.approx(2e-4)
    assert rates[10] == rates[49] == 2e-3
    assert rates[75] == pytest.approx(1e-3)
    assert rates[-1] < 1e-5
    loss = LossConfig(
        start=LossWeights(ce=1, kl=0, tv=0), end=LossWeights(ce=0, kl=0, tv=1), curriculum_fraction=0.5
    )
    assert loss_weights(0, 100, loss) == loss.start
    assert loss_weights(25, 100, loss) == LossWeights(ce=0.5, kl=0, tv=0.5)
    assert loss_weights(80, 100, loss) == loss.end
