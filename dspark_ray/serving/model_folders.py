"""Where a model's files are on this node. Loads neither vllm nor torch: a drafter replica starts with it."""

from pathlib import Path

from dspark_ray.config import ModelConfig
from dspark_ray.errors import ConfigError
from dspark_ray.sources import resolve_source


def checkpoint_folder(model: ModelConfig) -> Path:
    """The folder of the model's draft checkpoint.

    Raises:
        ConfigError: it is not on this node.
    """
    return _folder(model, "drafter.source", model.drafter.source or "")


def target_folder(model: ModelConfig) -> Path:
    """The folder of a model that has a drafter, which needs its target's files.

    Raises:
        ConfigError: it is not on this node.
    """
    return _folder(model, "target.source", model.target.source)


def _folder(model: ModelConfig, field: str, source: str) -> Path:
    resolved = resolve_source(source, f"model {model.id}: {field}")
    if not Path(resolved).is_absolute():
        raise ConfigError(
            f"model {model.id}: {field}: with a drafter, {resolved} must be a folder on every node: "
            "download it first"
        )
    return Path(resolved)
