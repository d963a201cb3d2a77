"""What a folder of weights is, told from its content: the same everywhere, and another after any training."""

import hashlib
import json
from pathlib import Path
from typing import BinaryIO

from dspark_ray.errors import ConfigError

SAMPLE_BYTES = 4096
HEADER_LIMIT_BYTES = 100 << 20


def fingerprint(draft_checkpoint: Path, target: Path) -> str:
    """Identify a pair of drafter and target.

    Both ends compute it from their own copies, so that a verifier never drafts with another model's drafter,
    nor with another version of its own.

    Raises:
        ConfigError: a folder has no config.json.
    """
    both = folder_fingerprint(draft_checkpoint) + folder_fingerprint(target)
    return hashlib.blake2b(both.encode(), digest_size=16).hexdigest()


def folder_fingerprint(folder: Path) -> str:
    """Identify a model by its configuration and a sample of every tensor.

    Training moves whole tensors, so the first and the middle bytes of each are enough, and a large target costs
    a few hundred small reads instead of all its gigabytes.

    Raises:
        ConfigError: no readable config.json.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: no readable config.json: {error}") from None
    digest.update(json.dumps(config, sort_keys=True).encode())
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.name.encode())
        with file.open("rb") as data:
            for part in _samples(data, file):
                digest.update(part)
    return digest.hexdigest()


def _samples(data: BinaryIO, file: Path) -> list[bytes]:
    """The header of a safetensors file, then the first and middle bytes of each tensor.

    Raises:
        ConfigError: it is no safetensors file.
    """
    length = int.from_bytes(data.read(8), "little")
    header = data.read(min(length, HEADER_LIMIT_BYTES))
    try:
        # Not __metadata__: tools write dates and versions there.
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        offsets = [entry["data_offsets"] for entry in tensors.values()]
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise ConfigError(f"{file}: not a safetensors file: {error}") from None
    parts = [json.dumps(tensors, sort_keys=True).encode()]
    for begin, end in sorted(offsets):
        for at in (begin, (begin + end) // 2):
            data.seek(8 + length + at)
            parts.append(data.read(min(SAMPLE_BYTES, end - at)))
    return parts
