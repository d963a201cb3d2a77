"""Checkpoints in both formats: round trips, conventions, and one clear error for every mismatch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dspark_ray.drafter.checkpoint import load_draft_config, load_drafter, load_projection, save_drafter
from dspark_ray.drafter.model import DSparkModel
from dspark_ray.errors import CheckpointError


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    config = {"hidden_size": 16, "vocab_size": 50, "num_hidden_layers": 4, "eos_token_id": [1, 2]}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(5)
    save_file({"model.embed_tokens.weight": torch.randn(50, 16)}, folder / "model.safetensors")
    return folder


def change(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    raw = json.loads(file.read_text())
    raw.update(fields)
    file.write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"draft_vocab_size": 20},
        {"markov_rank": 0, "enable_confidence_head": False},
        {"markov_head_type": "gated", "confidence_head_type": "mlp"},
        {"markov_head_type": "rnn", "confidence_head_with_markov": False, "sliding_window": 8},
        {"markov_temp_scale": True, "sample_from_anchor": False, "target_layer_ids": (-1, 2)},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_trip_is_bit_equal(
    make_model: Callable[..., DSparkModel],
    tmp_path: Path,
    target: Path,
    changes: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    model = make_model(**changes).to(dtype)
    save_drafter(model, tmp_path / "a")
    loaded = load_drafter(tmp_path / "a", target=target)
    assert loaded.config == model.config
    assert loaded.dtype == dtype
    for name, value in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), value), name
    assert torch.equal(loaded.draft_to_target, model.draft_to_target)
    save_drafter(loaded, tmp_path / "b")
    first, second = (load_file(tmp_path / x / "model.safetensors") for x in "ab")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert json.loads((tmp_path / "a/config.json").read_text()) == json.loads(
        (tmp_path / "b/config.json").read_text()
    )


def test_each_format_has_its_own_names_and_layer_ids(
    make_model: Callable[..., DSparkModel], tmp_path: Path
) -> None:
    """Fault 6: DeepSpec [0, 2] is speculators [1, 3]; missing sample_from_anchor means true and false."""
    save_drafter(make_model(), tmp_path / "deepspec", export_ends=True)
    raw = json.loads((tmp_path / "deepspec/config.json").read_text())
    assert raw["architectures"] == ["Qwen3DSparkModel"]
    assert raw["target_layer_ids"] == [0, 2]
    names = load_file(tmp_path / "deepspec/model.safetensors").keys()
    assert {
        "fc.weight",
        "hidden_norm.weight",
        "layers.1.self_attn.q_norm.weight",
        "markov_head.markov_w2.weight",
        "confidence_head.proj.bias",
        "embed_tokens.weight",
        "lm_head.weight",
    } <= set(names)
    change(tmp_path / "deepspec", sample_from_anchor=None)
    assert load_draft_config(tmp_path / "deepspec").sample_from_anchor

    save_drafter(make_model(draft_vocab_size=20), tmp_path / "speculators")
    raw = json.loads((tmp_path / "speculators/config.json").read_text())
    assert raw["aux_hidden_state_layer_ids"] == [1, 3]
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    with safe_open(tmp_path / "speculators/model.safetensors", framework="pt") as file:
        ids = file.get_tensor("d2t") + torch.arange(20)
        assert file.get_tensor("t2d").nonzero().flatten().tolist() == ids.tolist()
        assert file.get_tensor("lm_head.weight").shape == (20, 16)
    change(tmp_path / "speculators", sample_from_anchor=None)
    config = load_draft_config(tmp_path / "speculators")
    assert not config.sample_from_anchor
    assert config.num_draft_tokens == 3
    assert config.target_layer_ids == (0, 2)


def test_a_speculators_file_need_not_know_its_targets_depth(
    make_model: Callable[..., DSparkModel], tmp_path: Path, target: Path
) -> None:
    save_drafter(make_model(draft_vocab_size=20), tmp_path / "draft")
    change(tmp_path / "draft", num_target_layers=None)
    assert load_drafter(tmp_path / "draft", target=target).config.num_target_layers == 4
    change(tmp_path / "draft", aux_hidden_state_layer_ids=[1, 4])  # DeepSpec 3 is the target's last layer
    with pytest.raises(CheckpointError, match="the last layer"):
        load_drafter(tmp_path / "draft", target=target)


def test_fc_is_as_wide_as_the_taps_whatever_the_depth(
    make_model: Callable[..., DSparkModel], tmp_path: Path
) -> None:
    save_drafter(make_model(num_hidden_layers=1), tmp_path)
    projection = load_projection(tmp_path)
    assert projection.fc.weight.shape == (16, 2 * 16)


def test_loading_draws_no_random_numbers(
    make_model: Callable[..., DSparkModel], tmp_path: Path, target: Path
) -> None:
    """Of the ranks of a tensor-parallel engine one loads, and all must go on to sample alike."""
    save_drafter(make_model(), tmp_path)
    before = torch.get_rng_state()
    load_projection(tmp_path)
    load_drafter(tmp_path, target=target)
    assert torch.equal(torch.get_rng_state(), before)


def test_missing_ends_come_from_the_target(
    make_model: Callable[..., DSparkModel], tmp_path: Path, target: Path
) -> None:
    save_drafter(make_model(), tmp_path / "draft")
    embed = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    loaded = load_drafter(tmp_path / "draft", target=target)
    assert torch.equal(loaded.embed_weight, embed)
    assert torch.equal(loaded.lm_head_weight, embed)
    with pytest.raises(CheckpointError, match="name the target"):
        load_drafter(tmp_path / "draft")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 32}, r"hidden_size is 32, target target has 16"),
        ({"vocab_size": 60}, r"vocab_size is 60, target target has 50"),
        ({"num_target_layers": 5}, r"num_target_layers is 5, target target has 4"),
        ({"target_layer_ids": [1, 3]}, r"the last layer \(3\)"),
        ({"mask_token_id": 2}, "mask_token_id 2 is the target's end-of-sequence"),
        ({"mask_token_id": 99}, "mask_token_id 99 is outside the vocabulary"),
        ({"markov_head_type": "lstm"}, "unknown markov_head_type 'lstm'"),
        ({"confidence_head_type": "tree"}, "unknown confidence_head_type 'tree'"),
        ({"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel drafts"),
        ({"architectures": ["LlamaForCausalLM"]}, "is no DSpark draft"),
        ({"block_size": None}, "lacks block_size"),
        ({"markov_rank": 6}, r"markov_w1.weight is \[50, 5\], config.json says \[50, 6\]"),
        ({"num_hidden_layers": 3}, r"missing tensors \['layers.2"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
    ],
)
def test_a_mismatch_is_one_clear_error(
    make_model: Callable[..., DSparkModel],
    tmp_path: Path,
    target: Path,
    fields: dict[str, Any],
    message: str,
) -> None:
    save_drafter(make_model(), tmp_path / "draft")
    change(tmp_path / "draft", **fields)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(tmp_path / "draft", target=target)


def test_a_pickled_or_broken_file_is_refused(
    make_model: Callable[..., DSparkModel], tmp_path: Path, target: Path
) -> None:
    save_drafter(make_model(), tmp_path / "draft")
    weights = tmp_path / "draft/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_drafter(tmp_path / "draft", target=target)
    weights.unlink()
    torch.save({}, tmp_path / "draft/pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        load_drafter(tmp_path / "draft", target=target)
