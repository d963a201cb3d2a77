"""config.json of draft checkpoints, to and from `DraftConfig` (dspark-spec section 5)."""

import json
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from dspark_ray.drafter.model import DraftConfig
from dspark_ray.errors import CheckpointError

_MARKOV_HEADS = ("vanilla", "gated", "rnn")
_CONFIDENCE_HEADS = ("linear", "mlp")
_OWN_FIELDS = (  # named alike in both formats
    "block_size", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov", "sample_from_anchor",
)  # fmt: skip


def parse_draft_config(raw: dict[str, Any], path: Path) -> DraftConfig:
    """A drafter's configuration from either format.

    Args:
        raw: config.json.
        path: the checkpoint, for messages.

    Raises:
        CheckpointError: another architecture, a missing or wrong field; the message names it.
    """
    architectures = raw.get("architectures") or []
    if any("gemma" in str(name).lower() for name in architectures):
        raise CheckpointError(
            f"{path}: {architectures[0]} drafts have another architecture and are not supported"
        )
    if "speculators_model_type" in raw:
        if raw["speculators_model_type"] not in {"dspark", "dflash"}:
            raise CheckpointError(
                f"{path}: speculators_model_type {raw['speculators_model_type']!r} is no DSpark draft"
            )
        layer, anchor_default = raw.get("transformer_layer_config") or {}, False
        ids = [i - 1 for i in raw.get("aux_hidden_state_layer_ids") or []]
    elif any("DSpark" in str(name) or "DFlash" in str(name) for name in architectures):
        layer, anchor_default = raw, True
        ids = raw.get("target_layer_ids") or (raw.get("dflash_config") or {}).get("target_layer_ids") or []
    else:
        raise CheckpointError(f"{path}: architectures {architectures} is no DSpark draft")
    for field, known in (("markov_head_type", _MARKOV_HEADS), ("confidence_head_type", _CONFIDENCE_HEADS)):
        if raw.get(field) is not None and raw[field] not in known:
            raise CheckpointError(f"{path}: unknown {field} {raw[field]!r}; known: {', '.join(known)}")
    try:
        return _build(raw, layer, ids, sample_from_anchor=raw.get("sample_from_anchor", anchor_default))
    except KeyError as error:
        raise CheckpointError(f"{path}: config.json lacks {error.args[0]}") from error
    except ValidationError as error:
        details = "; ".join(f"{'.'.join(map(str, e['loc']))} {e['msg']}".strip() for e in error.errors())
        raise CheckpointError(f"{path}: {details}") from error


def config_to_deepspec(config: DraftConfig, dtype: torch.dtype, *, with_anchors: bool) -> dict[str, Any]:
    """DeepSpec's config.json: the layer's fields flat beside the draft's own.

    Args:
        config: the drafter's.
        dtype: of the weights.
        with_anchors: also write num_anchors, a training field that DeepSpec's own loader wants.
    """
    raw = {
        **_layer_fields(config, dtype),
        "architectures": ["Qwen3DSparkModel"],
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        **_own_fields(config),
    }
    return {**raw, "num_anchors": 512} if with_anchors else raw


def config_to_speculators(config: DraftConfig, dtype: torch.dtype, verifier: str | None) -> dict[str, Any]:
    """The speculators library's config.json: the layer's fields nested, layer ids counted from 1."""
    return {
        "speculators_model_type": "dspark",
        "speculators_version": "0.5.0",
        "architectures": ["Qwen3DSparkModel"],
        "transformer_layer_config": _layer_fields(config, dtype),
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "num_target_layers": config.num_target_layers,
        "target_hidden_size": config.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        **_own_fields(config),
        "dtype": str(dtype).removeprefix("torch."),
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_draft_tokens}],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
    }


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: missing, unreadable or no object.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return raw


def write_json(path: Path, raw: dict[str, Any]) -> None:
    """Write a JSON object, indented."""
    path.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def _build(
    raw: dict[str, Any], layer: dict[str, Any], ids: list[int], *, sample_from_anchor: bool
) -> DraftConfig:
    rope = {**(layer.get("rope_scaling") or {}), **(layer.get("rope_parameters") or {})}
    heads, hidden, vocab = layer["num_attention_heads"], layer["hidden_size"], layer["vocab_size"]
    return DraftConfig(
        hidden_size=hidden,
        num_hidden_layers=layer["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=layer["num_key_value_heads"],
        head_dim=layer.get("head_dim") or hidden // heads,
        intermediate_size=layer["intermediate_size"],
        rms_norm_eps=layer.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta") or layer.get("rope_theta") or 10000.0,
        rope_type=rope.get("rope_type") or rope.get("type") or "default",
        rope_factor=rope.get("factor", 1.0),
        max_position_embeddings=layer.get("max_position_embeddings", 8192),
        vocab_size=vocab,
        draft_vocab_size=raw.get("draft_vocab_size") or vocab,
        block_size=raw["block_size"],
        mask_token_id=raw["mask_token_id"],
        target_layer_ids=tuple(ids),
        num_target_layers=raw.get("num_target_layers") or max(ids, default=-1) + 2,
        target_hidden_size=raw.get("target_hidden_size") or hidden,
        markov_rank=raw.get("markov_rank", 0),
        markov_head_type=raw.get("markov_head_type") or "vanilla",
        markov_temp_scale=raw.get("markov_temp_scale", False),
        enable_confidence_head=raw.get("enable_confidence_head", False),
        confidence_head_type=raw.get("confidence_head_type") or "linear",
        confidence_head_with_markov=raw.get("confidence_head_with_markov", False),
        sample_from_anchor=sample_from_anchor,
        sliding_window=layer.get("sliding_window") if layer.get("use_sliding_window", True) else None,
    )


def _layer_fields(config: DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    scaling = {"rope_type": config.rope_type, "factor": config.rope_factor}
    return {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_type == "default" else scaling,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "dtype": str(dtype).removeprefix("torch."),
    }


def _own_fields(config: DraftConfig) -> dict[str, Any]:
    fields = {name: getattr(config, name) for name in _OWN_FIELDS}
    extra = {}
    if config.markov_temp_scale:
        extra["markov_temp_scale"] = True
    if config.confidence_head_type != "linear":
        extra["confidence_head_type"] = config.confidence_head_type
    return {**fields, **extra}
