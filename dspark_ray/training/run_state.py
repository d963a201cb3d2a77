"""A training run on disk: exact resume state, metrics, provenance. Weights are safetensors only."""

import hashlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspark_ray.errors import ConfigError


def save_state(path: Path, tensors: dict[str, Tensor], step: int, fingerprint: str) -> None:
    """Write all tensors and the step number; a kill in the middle leaves the previous file whole."""
    temporary = path.with_suffix(".tmp")
    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    save_file(plain, temporary, metadata={"step": str(step), "fingerprint": fingerprint})
    temporary.replace(path)


def load_state(path: Path, fingerprint: str) -> tuple[dict[str, Tensor], int]:
    """Read what `save_state` wrote.

    Raises:
        ConfigError: the state belongs to a run with another model, data or seed.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        if metadata["fingerprint"] != fingerprint:
            raise ConfigError(
                f"{path} was written by a run with other draft, data or seed settings: name another run_dir"
            )
        return {name: file.get_tensor(name) for name in file.keys()}, int(metadata["step"])  # noqa: SIM118


def append_json_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a JSON file, indented."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def fingerprint_of(parts: Any) -> str:
    """A short digest of JSON-able settings."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def provenance(config: dict[str, Any], data_files: tuple[Path, ...]) -> dict[str, Any]:
    """What made a set of weights: configuration, command, data hashes, versions, commit.

    Absolute paths are cut to their last part: where things lay says nothing elsewhere.
    """
    packages = ("torch", "transformers", "safetensors")
    return {
        "command": _portable(["dspark-ray", *sys.argv[1:]]),
        "config": _portable(config),
        "data_sha256": {path.name: sha256_of(path) for path in data_files},
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "commit": _commit(),
    }


def _portable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _portable(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(part) for part in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def _commit() -> str | None:
    """The code's git commit, or None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  fixed command
    except OSError:
        return None
    return done.stdout.strip() or None
