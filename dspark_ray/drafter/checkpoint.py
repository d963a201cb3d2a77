"""Draft checkpoints: DeepSpec and speculators formats, read and written (dspark-spec section 5).

A full draft vocabulary is written as DeepSpec, a reduced one as speculators with its lm_head and d2t, which
is what vLLM's own `dspark` method reads. Reading takes either, and safetensors only.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dspark_ray.drafter.checkpoint_config import (
    config_to_deepspec,
    config_to_speculators,
    parse_draft_config,
    read_json,
    write_json,
)
from dspark_ray.drafter.model import DraftConfig, DSparkModel, FeatureProjection
from dspark_ray.errors import CheckpointError

_PROJECTION = ("fc.weight", "hidden_norm.weight")  # the model keeps these under `projection.`
# read or ignored beside the model's own parameters
_ENDS = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d", "mask_embedding")


def load_draft_config(path: Path, target: Path | None = None) -> DraftConfig:
    """Read a checkpoint's config.json, either format.

    Args:
        path: directory of the checkpoint.
        target: directory of the target, which knows its own depth: the speculators format need not say it.

    Raises:
        CheckpointError: unreadable, another architecture, or values that contradict each other.
    """
    raw = read_json(path / "config.json")
    if target is not None and raw.get("num_target_layers") is None:
        raw["num_target_layers"] = _target_text_config(target)["num_hidden_layers"]
    return parse_draft_config(raw, path)


def check_fits_target(config: DraftConfig, target: Path) -> None:
    """Hold a drafter against its target's config.json.

    Args:
        config: the drafter's.
        target: directory of the target model.

    Raises:
        CheckpointError: another width, vocabulary or depth, or a mask id that the target's text uses.
    """
    text = _target_text_config(target)
    for field, ours, theirs in (
        ("target_hidden_size", config.target_hidden_size, text["hidden_size"]),
        ("hidden_size", config.hidden_size, text["hidden_size"]),
        ("vocab_size", config.vocab_size, text["vocab_size"]),
        ("num_target_layers", config.num_target_layers, text["num_hidden_layers"]),
    ):
        if ours != theirs:
            raise CheckpointError(
                f"drafter {field} is {ours}, target {target.name} has {theirs}: this drafter was trained for "
                "another target"
            )
    stops = text.get("eos_token_id")
    stops = [stops] if isinstance(stops, int) else list(stops or [])
    if config.mask_token_id in stops:
        raise CheckpointError(
            f"mask_token_id {config.mask_token_id} is the target's end-of-sequence token: choose another"
        )


def load_drafter(
    path: Path, *, target: Path | None = None, dtype: torch.dtype | None = None, device: str = "cpu"
) -> DSparkModel:
    """Load a drafter, ready to draft.

    Args:
        path: directory with config.json and safetensors, either format.
        target: directory of the target model, which lends its embedding, and its lm_head where the checkpoint
            has none. Needed unless the checkpoint carries both.
        dtype: of weights and activations; the checkpoint's own when None.
        device: torch device.

    Raises:
        CheckpointError: something is missing or does not fit; one message that names it.
    """
    config = load_draft_config(path, target)
    if target is not None:
        check_fits_target(config, target)
    tensors = _read_tensors(path)
    ends = {name: tensors.pop(name, None) for name in _ENDS}
    embed, lm_head = ends["embed_tokens.weight"], ends["lm_head.weight"]
    if config.reduced_vocabulary and ends["d2t"] is None:
        raise CheckpointError(f"{path}: draft_vocab_size is reduced but the file has no d2t")
    if embed is None or lm_head is None:
        if target is None:
            raise CheckpointError(f"{path} has no embed_tokens or lm_head: name the target to take them from")
        target_embed, target_head = _target_ends(target)
        embed = target_embed if embed is None else embed
        lm_head = target_head if lm_head is None else lm_head
    with _without_drawing():
        model = DSparkModel(config)
    _fill(model, tensors, path)
    model = model.to(device, dtype or tensors["norm.weight"].dtype).eval().requires_grad_(False)
    draft_to_target = None
    if config.reduced_vocabulary:
        draft_to_target = torch.arange(config.draft_vocab_size) + ends["d2t"].to(torch.int64)
        if draft_to_target.min() < 0 or draft_to_target.max() >= config.vocab_size:
            raise CheckpointError(f"{path}: d2t leads outside the vocabulary {config.vocab_size}")
    try:
        model.attach_target(embed, lm_head, draft_to_target)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return model


def load_projection(
    path: Path, *, dtype: torch.dtype | None = None, device: str = "cpu"
) -> FeatureProjection:
    """Load only fc and hidden_norm, for the target's process.

    Raises:
        CheckpointError: as `load_drafter`.
    """
    with _without_drawing():
        projection = FeatureProjection(load_draft_config(path))
    tensors = _read_tensors(path, only=_PROJECTION)
    _fill(projection, tensors, path)
    return projection.to(device, dtype or tensors["fc.weight"].dtype).eval().requires_grad_(False)


def _without_drawing() -> AbstractContextManager[None]:
    """Around new modules, whose first weights are drawn only to be replaced.

    The ranks of a tensor-parallel engine sample alike as long as their generators are equal, and one of them loads.
    """
    return torch.random.fork_rng(devices=[])


def save_drafter(
    model: DSparkModel,
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    export_ends: bool = False,
    verifier: str | None = None,
) -> None:
    """Write config.json and model.safetensors; speculators format iff the draft vocabulary is reduced.

    Args:
        model: the drafter, target attached.
        path: directory, made if missing.
        dtype: of the file's weights; the model's own when None.
        export_ends: also write embed_tokens and lm_head, which DeepSpec's own loader wants.
        verifier: the target's name, recorded in the speculators format.
    """
    config, dtype = model.config, dtype or model.dtype
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name.removeprefix("projection."): value.to(dtype) for name, value in model.named_parameters()}
    if export_ends:
        tensors["embed_tokens.weight"] = model.embed_weight.to(dtype)
    if export_ends or config.reduced_vocabulary:
        tensors["lm_head.weight"] = model.lm_head_weight.to(dtype)
    if config.reduced_vocabulary:
        ids = model.draft_to_target.cpu()
        tensors["d2t"] = ids - torch.arange(config.draft_vocab_size)
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, value=True)
        raw = config_to_speculators(config, dtype, verifier)
    else:
        raw = config_to_deepspec(config, dtype, with_anchors=export_ends)
    plain = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    temporary = path / "model.safetensors.tmp"
    save_file(plain, temporary, metadata={"format": "pt"})
    write_json(path / "config.json", raw)
    temporary.replace(path / "model.safetensors")


def _target_text_config(target: Path) -> dict[str, Any]:
    """The target's text configuration; a multimodal model nests it and may keep eos_token_id outside."""
    raw = read_json(target / "config.json")
    return {**raw, **(raw.get("text_config") or {})}


def _read_tensors(path: Path, only: tuple[str, ...] | None = None) -> dict[str, Tensor]:
    """Tensors of all safetensors files of a directory, a leading `model.` removed."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} holds no .safetensors file (pickled weights are not read)")
    tensors: dict[str, Tensor] = {}
    for name in files:
        try:
            with safe_open(name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  safe_open is no mapping
                    short = key.removeprefix("model.")
                    if only is None or short in only:
                        tensors[short] = file.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{name}: {error}") from error
    return tensors


def _fill(module: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Copy tensors into a module's parameters; every name and shape must match."""
    parameters = {name.removeprefix("projection."): value for name, value in module.named_parameters()}
    # DeepSpec writes the confidence head with or without a bias
    if "confidence_head.proj.bias" in parameters and "confidence_head.proj.bias" not in tensors:
        tensors["confidence_head.proj.bias"] = torch.zeros(1, dtype=tensors["norm.weight"].dtype)
    missing, unknown = sorted(parameters.keys() - tensors.keys()), sorted(tensors.keys() - parameters.keys())
    if missing or unknown:
        raise CheckpointError(f"{path}: missing tensors {missing}, unknown tensors {unknown}")
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            raise CheckpointError(
                f"{path}: {name} is {list(tensors[name].shape)}, config.json says {list(parameter.shape)}"
            )
        parameter.data = tensors[name]


def _target_ends(target: Path) -> tuple[Tensor, Tensor]:
    """The target's embedding and lm_head, [V, d] each, read without loading the rest of it."""
    found: dict[str, Tensor] = {}
    for name in sorted(target.glob("*.safetensors")):
        with safe_open(name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  safe_open is no mapping
                for end in ("embed_tokens.weight", "lm_head.weight"):
                    if key.endswith(end):
                        found[end] = file.get_tensor(key)
    embed = found.get("embed_tokens.weight")
    if embed is None:
        raise CheckpointError(f"target {target} has no embed_tokens.weight in its safetensors files")
    lm_head: Any = found.get("lm_head.weight", embed)  # tied
    return embed, lm_head
