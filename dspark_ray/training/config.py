"""What a training run is made of: one TOML or YAML file, checked before anything is loaded."""

import tomllib
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from dspark_ray.config import FrozenModel
from dspark_ray.errors import ConfigError
from dspark_ray.sources import resolve_source


class DraftShape(FrozenModel):
    """The drafter to train; width, heads and vocabulary follow from the target."""

    num_hidden_layers: int = Field(default=2, ge=1)
    """Draft layers, initialised from the target's last ones."""
    block_size: int = Field(default=5, ge=1)
    """γ, tokens drafted in a block."""
    target_layer_ids: tuple[int, ...] = Field(min_length=1)
    """Tap layers, 0-based, strictly increasing, never the last."""
    mask_token_id: int = Field(ge=0)
    """A token that text never contains."""
    draft_vocab_size: int | None = Field(default=None, ge=1)
    """Most frequent answer tokens that can be drafted; all when unset."""
    markov_rank: int = Field(default=64, ge=0)
    """Rank of the Markov head; 0 trains a DFlash drafter."""
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    """Form of the Markov head."""
    enable_confidence_head: bool = True
    """Whether confidences are trained."""
    confidence_head_type: Literal["linear", "mlp"] = "linear"
    """linear sees only earlier tokens, mlp also the drafted one."""
    sliding_window: int | None = Field(default=None, ge=1)
    """Context rows a block sees; all when unset."""
    init_from: Path | None = None
    """A draft checkpoint to go on from, with its vocabulary; the target's layers when unset."""


class LossWeights(FrozenModel):
    """Weights of the loss terms (dspark-spec section 2)."""

    ce: float = Field(default=0.1, ge=0)
    """Cross-entropy with the data token."""
    kl: float = Field(default=0.0, ge=0)
    """KL(p‖q) with the teacher."""
    tv: float = Field(default=0.9, ge=0)
    """‖q-p‖₁ with the teacher."""


class LossConfig(FrozenModel):
    """The loss and how it changes over the run."""

    start: LossWeights = LossWeights(ce=0.1, kl=1.0, tv=0.0)
    """Weights at the first step: TV gradients vanish from a cold start."""
    end: LossWeights = LossWeights()
    """Weights from `curriculum_fraction` of the run on; linear in between."""
    curriculum_fraction: float = Field(default=0.5, gt=0, le=1)
    """Share of the run after which the end weights hold."""
    confidence: float = Field(default=1.0, ge=0)
    """Weight of the confidence head's cross-entropy."""
    confidence_label: Literal["greedy", "overlap"] = "greedy"
    """greedy: 1[argmax q = argmax p], for argmax drafts; overlap: 1 - ½‖q-p‖₁, for sampled drafts."""
    position_decay: float = Field(default=4.0, gt=0)
    """γ_decay of w_k = exp(-(k-1)/γ_decay)."""


class OptimizerConfig(FrozenModel):
    """AdamW and its schedule: warm-up, constant, cosine to 0."""

    lr: float = Field(default=6e-4, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's decay rates."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest gradient norm."""
    steps: int = Field(ge=1)
    """Optimiser steps of the whole run."""
    warmup_fraction: float = Field(default=0.04, ge=0, lt=1)
    """Share of the steps with a rising learning rate."""
    decay_fraction: float = Field(default=0.96, ge=0, le=1)
    """Share of the steps, at the end, over which the rate falls to 0."""
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Decay a step of the averaged weights that are exported; no averaging when unset."""

    @model_validator(mode="after")
    def _phases(self) -> Self:
        if self.warmup_fraction + self.decay_fraction > 1 + 1e-9:
            raise ValueError("warmup_fraction + decay_fraction must not exceed 1")
        return self


class DataConfig(FrozenModel):
    """Token JSON lines made by `dspark-ray regenerate`, and how they are cut into steps."""

    files: tuple[Path, ...] = Field(min_length=1)
    """Answers to train on."""
    held_out: int = Field(default=64, ge=0)
    """Answers kept out of training, for validation and calibration."""
    max_sequences: int | None = Field(default=None, ge=1)
    """Train on the first of them only; may be raised when a run is resumed. All when unset."""
    max_length: int = Field(default=4096, ge=8)
    """Longer sequences are cut, in tokens."""
    anchors_per_sequence: int = Field(default=128, ge=1)
    """Most anchors that share one target forward."""
    sequences_per_step: int = Field(default=4, ge=1)
    """Sequences whose gradients make one optimiser step, over all ranks."""
    sequences_per_forward: int = Field(default=1, ge=1)
    """Sequences in one forward of one rank; the rest is gradient accumulation."""
    cache_dir: Path | None = None
    """Where target features are kept between epochs; unset computes them anew each time."""
    cache_gb: float = Field(default=8.0, gt=0)
    """Bound of that cache, in GB."""


class TrainConfig(FrozenModel):
    """A whole training run."""

    target: str
    """The target: a folder, a Hugging Face id, or demo:smollm2."""
    run_dir: Path
    """Where checkpoints, metrics and provenance go."""
    draft: DraftShape
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig
    data: DataConfig
    seed: int = 0
    """Seed of initialisation, order and anchors."""
    device: str = "cpu"
    """Torch device."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of matrix products; masters and moments are fp32."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads; torch's choice when unset."""
    log_every_steps: int = Field(default=10, ge=1)
    """Steps between two lines of metrics."""
    validate_every_steps: int = Field(default=500, ge=1)
    """Steps between two validations on held-out answers."""
    save_every_s: float = Field(default=180.0, gt=0)
    """Seconds between two checkpoints that resume exactly."""


def target_folder(source: str) -> Path:
    """The local folder of a target model; a Hugging Face id is fetched unless HF_HUB_OFFLINE is set.

    Raises:
        ConfigError: there is no such model.
    """
    resolved = Path(resolve_source(source, "target"))
    if resolved.is_dir():
        return resolved
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
        return Path(snapshot_download(str(resolved), allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise ConfigError(f"target: {source} cannot be fetched: {error}") from error


def load_train_config(path: Path, overrides: tuple[str, ...] = ()) -> TrainConfig:
    """Read a run's file, TOML or YAML.

    Args:
        path: the file.
        overrides: `a.b=value` assignments, values in YAML, applied over the file.

    Raises:
        ConfigError: the file cannot be read, or a field is unknown or wrong; the message names it.
    """
    try:
        text = path.read_text(encoding="utf-8")
        raw: Any = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping at the top")
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"override {override!r} must look like name=value")
        node = raw
        *parents, leaf = name.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = yaml.safe_load(value)
    try:
        return TrainConfig.model_validate(raw)
    except ValidationError as error:
        details = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"{path}: {details}") from error
