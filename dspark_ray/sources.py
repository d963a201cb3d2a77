"""Where models lie, and whether a drafter fits its target: checks at start-up that read JSON only.

A source in a configuration is a folder, a Hugging Face id, or ``demo:smollm2``. What cannot be read from here
(a Hugging Face id) is checked where it is loaded.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from dspark_ray.config import AppConfig, ModelConfig
from dspark_ray.errors import CheckpointError, ConfigError

DEMO_SOURCE = "demo:smollm2"
CACHE_ENV = "DSPARK_RAY_CACHE"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
_PACKAGE_PARENT = Path(__file__).resolve().parent.parent


def demo_folder() -> Path:
    """The folder of the demo model: under $DSPARK_RAY_CACHE, else under ~/.cache/dspark_ray."""
    cache = Path(os.environ.get(CACHE_ENV) or Path.home() / ".cache" / "dspark_ray")
    return cache / "models" / "smollm2-135m-instruct"


def resolve_source(source: str, field: str) -> str:
    """Turn a source into what vLLM and transformers take: an absolute folder or a Hugging Face id.

    A relative folder is looked for in the working directory, then beside the ``dspark_ray`` package, so that
    a file under deployments/ can name a folder of the checkout wherever Ray starts its workers.

    Args:
        source: A folder, a Hugging Face id (org/name), or demo:smollm2.
        field: Name of the configuration field, for the error.

    Raises:
        ConfigError: naming the field, when there is no such model here.
    """
    if source == DEMO_SOURCE:
        folder = demo_folder()
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{field}: {source} is not in {folder}: run `dspark-ray fetch-demo`")
        return str(folder)
    if source.startswith("demo:"):
        raise ConfigError(f"{field}: there is no {source!r}, the only demo model is {DEMO_SOURCE!r}")
    path = Path(source).expanduser()
    for folder in (Path.cwd() / path, _PACKAGE_PARENT / path):
        if folder.is_dir():
            if not (folder / "config.json").is_file():
                raise ConfigError(f"{field}: {folder} has no config.json, so it is not a model folder")
            return str(folder)
    if _HUB_ID.match(source):
        return source
    raise ConfigError(
        f"{field}: no folder {source!r} here, and it is not a Hugging Face id (org/name): "
        f"give an existing folder, org/name, or {DEMO_SOURCE}"
    )


def check_sources(app: AppConfig) -> None:
    """Check every model and drafter that an application names.

    Raises:
        ConfigError: naming the field, when a folder is missing.
        CheckpointError: naming the field, when a drafter does not fit its target.
    """
    for index, model in enumerate(app.models):
        field = f"models.{index}"
        target = resolve_source(model.target.source, f"{field}.target.source")
        if model.drafter.placement == "none" or model.drafter.source is None:
            continue
        drafter = resolve_source(model.drafter.source, f"{field}.drafter.source")
        if Path(target).is_absolute() and Path(drafter).is_absolute():
            _check_fit(model, Path(drafter), Path(target), f"{field}.drafter")


def _read_config(folder: Path, field: str) -> dict[str, Any]:
    """The config.json of a model folder.

    Raises:
        CheckpointError: it cannot be read or is not a JSON object.
    """
    try:
        content = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{field}: {folder / 'config.json'} is unreadable: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{field}: {folder / 'config.json'} is not a JSON object")
    return content


def _check_fit(model: ModelConfig, drafter_folder: Path, target_folder: Path, field: str) -> None:
    """Compare the two config.json (spec section 5): widths, layers, block size.

    Raises:
        CheckpointError: naming what differs.
    """
    drafter = _read_config(drafter_folder, f"{field}.source")
    target = _read_config(target_folder, field.replace(".drafter", ".target.source"))
    target = target.get("text_config") or target
    shape = drafter.get("transformer_layer_config") or drafter  # nested in the speculators format
    for key in ("hidden_size", "vocab_size"):
        if shape.get(key) != target.get(key):
            raise CheckpointError(
                f"{field}.source: {drafter_folder} was made for another target: its {key} is "
                f"{shape.get(key)}, that of {target_folder} is {target.get(key)}"
            )
    layers = int(target["num_hidden_layers"])
    if drafter.get("num_target_layers", layers) != layers:
        raise CheckpointError(
            f"{field}.source: {drafter_folder} was made for another target: its num_target_layers is "
            f"{drafter['num_target_layers']}, {target_folder} has {layers}"
        )
    offset = 0 if "target_layer_ids" in drafter else 1  # speculators count from the embedding output
    taps = [
        i - offset for i in drafter.get("target_layer_ids") or drafter.get("aux_hidden_state_layer_ids") or ()
    ]
    if not taps or not all(-1 <= tap < layers - 1 for tap in taps):
        raise CheckpointError(
            f"{field}.source: {drafter_folder} taps layers {taps}; a target of {layers} layers has taps "
            f"-1 to {layers - 2}"
        )
    block_size = drafter.get("block_size")
    wanted = model.drafter.block_size
    if wanted is not None and block_size is not None and wanted > int(block_size):
        raise CheckpointError(
            f"{field}.block_size: {wanted} is more than the {block_size} of {drafter_folder}"
        )
