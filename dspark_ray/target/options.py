"""What the engine is told: ``additional_config={"dspark": {...}}``, validated where the worker starts."""

from typing import Any, Literal

from pydantic import ValidationError

from dspark_ray.config import FrozenModel
from dspark_ray.errors import ConfigError


class TargetOptions(FrozenModel):
    """Options of the shim in one engine."""

    exactness: Literal["coupled", "ratio"] = "coupled"
    """How drafts are accepted (dspark-spec.md section 3)."""


def options_of(vllm_config: Any) -> TargetOptions:
    """Read the options out of a VllmConfig; defaults where there are none.

    Raises:
        ConfigError: naming every offending field.
    """
    additional = vllm_config.additional_config
    raw = additional.get("dspark", {}) if isinstance(additional, dict) else {}
    try:
        return TargetOptions.model_validate(raw)
    except ValidationError as error:
        lines = [
            f"additional_config.dspark.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()
        ]
        raise ConfigError("invalid engine options:\n  " + "\n  ".join(lines)) from None
