"""Whole runs: overfitting, killing and resuming, data parallelism, and the measures at the end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_training import VOCAB, greedy, load_target, random_prompts, run_config, write_answers

from dspark_ray.decoding.calibration import CalibrationTable, Scaling
from dspark_ray.drafter.checkpoint import save_drafter
from dspark_ray.drafter.model import DSparkModel
from dspark_ray.errors import ConfigError
from dspark_ray.protocol import RoundRecord
from dspark_ray.training.calibrate import fit_logs, fit_rounds, read_logs, split_rounds, store
from dspark_ray.training.evaluate import collect_rounds, measure, plot_measures
from dspark_ray.training.trainer import Trainer


def decode(
    target: Path, drafter: Path, prompts: list[list[int]], temperature: float = 0.0, **options: object
):
    return collect_rounds(
        target, drafter, prompts, temperature=temperature, max_new_tokens=24, batch_size=3,
        dtype="float32", **options,
    )  # fmt: skip


@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_one_sample_overfits_to_nearly_the_whole_block(target: Path, tmp_path: Path, head: str) -> None:
    """The check that every piece is in its place: real speculative decoding of the sample afterwards."""
    prompt = random_prompts(1, seed=5)
    answers = write_answers(tmp_path / "one.jsonl", load_target(target), prompt, 40)
    config = run_config(
        target, tmp_path / "run", answers,
        draft={"markov_head_type": head, "draft_vocab_size": 40},
        optimizer={"steps": 250, "lr": 3e-3, "ema_decay": 0.9},
        # random weights make a flat teacher, whose overlap one can raise without getting its argmax
        loss={"end": {"ce": 1.0, "kl": 1.0, "tv": 0.5}},
        data={"sequences_per_step": 1},
    )  # fmt: skip
    Trainer(config).run()
    rounds = collect_rounds(
        target,
        tmp_path / "run/drafter",
        prompt,
        temperature=0.0,
        max_new_tokens=40,
        batch_size=1,
        dtype="float32",
    )
    assert len(set(rounds.outputs[0])) > 5, "a sample of one repeated token would prove nothing"
    assert measure(rounds, None)["accept_len"] >= 0.9 * 5
    assert (tmp_path / "run/drafter/provenance.json").exists()


@pytest.mark.parametrize("draft_vocab_size", [None, 30])
def test_a_bad_drafter_does_not_change_the_text(
    target: Path, answers: Path, tmp_path: Path, draft_vocab_size: int | None
) -> None:
    trainer = Trainer(
        run_config(target, tmp_path / "run", answers, draft={"draft_vocab_size": draft_vocab_size})
    )
    for parameter in trainer.parameters:
        parameter.data = torch.randn_like(parameter)
    save_drafter(trainer.model, tmp_path / "draft")
    prompts = random_prompts(7, seed=2)
    rounds = decode(target, tmp_path / "draft", prompts, window=6)
    model = load_target(target)
    for index, prompt in enumerate(prompts):
        plain = greedy(model, prompt, 24)
        assert rounds.outputs[index][:24] == plain
    assert rounds.accept_len.mean() < 2


def test_a_killed_run_resumes_to_the_same_next_step(target: Path, answers: Path, tmp_path: Path) -> None:
    changes = {"optimizer": {"ema_decay": 0.9}, "compute_dtype": "bfloat16", "save_every_s": 1e-9}
    straight = Trainer(run_config(target, tmp_path / "a", answers, **changes))
    straight.run()
    Trainer(run_config(target, tmp_path / "b", answers, **changes)).run(until=3)
    resumed = Trainer(run_config(target, tmp_path / "b", answers, **changes))
    assert resumed.step == 3
    resumed.run()
    a, b = (load_file(tmp_path / name / "state.safetensors") for name in "ab")
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name
    with pytest.raises(ConfigError, match="other draft, data or seed"):
        Trainer(run_config(target, tmp_path / "b", answers, seed=1, **changes))


def test_two_ranks_compute_the_step_of_one(target: Path, answers: Path, tmp_path: Path) -> None:
    alone = run_config(target, tmp_path / "one", answers, data={"cache_dir": str(tmp_path / "cache1")})
    Trainer(alone).run()
    pair = run_config(target, tmp_path / "two", answers, data={"cache_dir": str(tmp_path / "cache2")})
    file = tmp_path / "pair.yaml"
    file.write_text(json.dumps(pair.model_dump(mode="json")))  # JSON is YAML
    code = "from dspark_ray.cli import main; main()"
    script = tmp_path / "dspark-ray.py"
    script.write_text(code)
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(script), "train", str(file)],
        check=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    one, two = (load_file(tmp_path / name / "state.safetensors") for name in ("one", "two"))
    for name, value in one.items():
        if name.startswith("model."):
            torch.testing.assert_close(value, two[name], rtol=1e-3, atol=1e-4)
    texts = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("one", "two")]
    lines = [[json.loads(line) for line in text.splitlines()] for text in texts]
    assert lines[0][-1]["loss"] == pytest.approx(lines[1][-1]["loss"], rel=1e-3)
    assert (tmp_path / "two/learning.png").exists()


def test_dflash_gated_and_mlp_train_from_the_same_configuration(
    target: Path, answers: Path, tmp_path: Path
) -> None:
    for name, draft in {
        "dflash": {"markov_rank": 0, "enable_confidence_head": False},
        "gated": {"markov_head_type": "gated", "confidence_head_type": "mlp", "sliding_window": 8},
    }.items():
        Trainer(run_config(target, tmp_path / name, answers, draft=draft, optimizer={"steps": 2})).run()
        rounds = decode(target, tmp_path / name / "drafter", random_prompts(2))
        assert len(rounds.accept_len) > 0


def test_measures_and_calibration_of_real_rounds(target: Path, answers: Path, tmp_path: Path) -> None:
    trainer = Trainer(run_config(target, tmp_path / "run", answers, optimizer={"steps": 40}))
    trainer.run()
    drafter = tmp_path / "run/drafter"
    rounds = decode(target, drafter, random_prompts(12, seed=9), temperature=0.8)
    figures = measure(rounds, None)
    emitted = sum(len(tokens) - 1 for tokens in rounds.outputs.values())
    assert figures["tokens"] == emitted
    assert figures["accept_len"] == pytest.approx(emitted / figures["rounds"], abs=1e-4)
    assert figures["conditional_acceptance"][0] == pytest.approx((rounds.accept_len > 0).mean(), abs=1e-4)
    everything, nothing = (
        figures["thresholds"][0],
        measure(rounds, Scaling([1e-9] * 4, [0.0] * 4))["thresholds"][-1],
    )
    assert everything["verified"] == 4
    assert everything["accept_len"] == pytest.approx(1 + rounds.accept_len.mean(), abs=1e-4)
    assert nothing["verified"] < 4

    fit_on, report_on = split_rounds(rounds, seed=0)
    assert not set(fit_on.request) & set(report_on.request)
    assert len(fit_on.request) + len(report_on.request) == len(rounds.request)
    greedy_entry = fit_rounds(fit_on, temperature=0.0, dataset="tiny")
    warm_entry = fit_rounds(fit_on, temperature=0.8, dataset="tiny")
    store(drafter, [greedy_entry])
    store(drafter, [warm_entry])
    table = store(drafter, [greedy_entry])  # replaces its like, keeps the other
    assert CalibrationTable.load(drafter) == table
    assert {entry.temperature_bucket for entry in table.entries} == {"greedy", "medium"}
    plot_measures(rounds, warm_entry.scaling, "tiny", tmp_path / "plots")
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {
        "acceptance.png", "reliability.png", "thresholds.png",
    }  # fmt: skip


def test_calibration_from_serving_logs_separates_kinds(tmp_path: Path) -> None:
    common = {"confidence_logits": [1.0, 0.5], "verify_len": 2, "exactness": "coupled"}
    rows = [{**common, "accept_len": i % 3, "temperature": t} for i in range(30) for t in (0.0, 0.9)]
    path = tmp_path / "rounds.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    records = read_logs(str(path), model=None)
    assert isinstance(records[0], RoundRecord)
    fitted = fit_logs(records, dataset="logs")
    assert {(entry.temperature_bucket, entry.sample_count) for entry in fitted} == {
        ("greedy", 30),
        ("medium", 30),
    }
    with pytest.raises(ConfigError, match="full_round_share"):
        fit_logs([], dataset="logs")
    with pytest.raises(ConfigError, match="needs --model"):
        read_logs("redis://somewhere", model=None)


def test_draft_vocabulary_limits_what_is_drafted(target: Path, answers: Path, tmp_path: Path) -> None:
    trainer = Trainer(run_config(target, tmp_path / "run", answers, draft={"draft_vocab_size": 10}))
    model: DSparkModel = trainer.model
    assert model.config.draft_vocab_size == 10
    assert 0 < trainer.coverage < 1
    assert model.draft_to_target.max() < VOCAB
