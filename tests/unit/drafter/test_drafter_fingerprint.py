"""The same files have the same fingerprint anywhere; other weights have another."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dspark_ray.drafter.fingerprint import fingerprint, folder_fingerprint
from dspark_ray.errors import ConfigError


def folder(path: Path, config: dict | None = None, metadata: str = "a", **changed: torch.Tensor) -> Path:
    path.mkdir()
    tensors = {"large": torch.arange(50_000.0), "small": torch.ones(3), "empty": torch.empty(0)}
    save_file(tensors | changed, path / "model.safetensors", {"made": metadata})
    (path / "config.json").write_text(json.dumps(config or {"hidden_size": 4}))
    return path


def test_only_content_counts(tmp_path: Path) -> None:
    first = folder(tmp_path / "a")
    copy = folder(tmp_path / "b", metadata="another date")
    os.utime(copy / "model.safetensors", (1, 1))
    assert folder_fingerprint(first) == folder_fingerprint(copy)
    assert fingerprint(first, copy) == fingerprint(copy, first)


@pytest.mark.parametrize(
    "changed",
    [
        {"large": torch.arange(50_000.0) + 0.5},
        {"small": torch.tensor([1.0, 1.0, 2.0])},
        {"config": {"hidden_size": 8}},
        {"more": torch.ones(1)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_the_same_sizes_with_other_weights_differ(tmp_path: Path, changed: dict) -> None:
    base = folder_fingerprint(folder(tmp_path / "a"))
    other = folder(tmp_path / "b", **changed)
    assert folder_fingerprint(other) != base
    assert fingerprint(tmp_path / "a", other) != fingerprint(other, tmp_path / "a")


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        folder_fingerprint(tmp_path)
    broken = folder(tmp_path / "a")
    (broken / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        folder_fingerprint(broken)
