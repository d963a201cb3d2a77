"""The frozen target: hidden-state capture, teacher probabilities, and an optional bounded cache of both.

Shapes: B sequences · T tokens · m tap layers · d hidden size · V vocabulary · V' draft vocabulary.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dspark_ray.errors import ConfigError
from dspark_ray.training.data import AnchorBatch


@dataclass(frozen=True)
class Captured:
    """What training needs of one target forward.

    Attributes:
        taps: raw residual outputs of the tap layers, [B, T, m·d].
        hidden: final-norm hidden states, [B, T, d].
        log_normaliser: logsumexp of the logits over the whole vocabulary, [B, T] fp32.
        best: argmax of the logits over the whole vocabulary, [B, T] int64.
    """

    taps: Tensor
    hidden: Tensor
    log_normaliser: Tensor
    best: Tensor


class FrozenTarget:
    """A Hugging Face causal LM that never gets a gradient.

    Args:
        path: local directory of the model, safetensors.
        layer_ids: tap layers, DeepSpec ids.
        dtype: of weights and outputs.
        device: torch device.
    """

    def __init__(self, path: Path, layer_ids: tuple[int, ...], dtype: torch.dtype, device: str):
        self.model = load_causal_lm(path, dtype, device)
        self.layer_ids = layer_ids
        self.dtype, self.device = dtype, device

    @property
    def config(self) -> Any:
        """The target's text configuration."""
        return self.model.config.get_text_config()

    @property
    def embed_weight(self) -> Tensor:
        """[V, d]."""
        return self.model.get_input_embeddings().weight

    @property
    def lm_head_weight(self) -> Tensor:
        """[V, d]."""
        return self.model.get_output_embeddings().weight

    @torch.no_grad()
    def capture(self, batch: AnchorBatch) -> Captured:
        """One forward over whole sequences.

        Rows past a sequence's length are garbage. `log_normaliser` and `best` are computed where an answer's
        tokens are predicted, from the shortest prompt's last position on, and 0 before.
        """
        ids = batch.ids.to(self.device)
        mask = torch.arange(ids.shape[1]) < batch.lengths[:, None]
        out = self.model.model(
            input_ids=ids,
            attention_mask=None if bool(mask.all()) else mask.to(self.device),
            output_hidden_states=True,
            use_cache=False,
        )
        taps = torch.cat([out.hidden_states[layer + 1] for layer in self.layer_ids], dim=-1)
        hidden = out.last_hidden_state
        first = int(batch.prompt_lens.min()) - 1
        log_normaliser = torch.zeros(ids.shape, device=self.device)
        best = torch.zeros_like(ids)
        # contiguous: a CPU takes three times as long for a strided view
        logits = nn.functional.linear(hidden[:, first:].contiguous(), self.lm_head_weight)
        for row in range(len(ids)):  # one row at a time: the fp32 copy stays small
            highest = logits[row].max(-1)
            best[row, first:] = highest.indices
            log_normaliser[row, first:] = logits[row].float().logsumexp(-1)
        return Captured(taps, hidden, log_normaliser, best)


def load_causal_lm(path: Path, dtype: torch.dtype, device: str) -> Any:
    """A local Hugging Face causal LM without gradients, in evaluation mode.

    Raises:
        ConfigError: the directory does not exist.
    """
    from transformers import AutoModelForCausalLM

    if not path.is_dir():
        raise ConfigError(f"target {path} is not a directory; `dspark-ray fetch-demo` makes the demo model")
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, local_files_only=True, use_safetensors=True
    )
    return model.to(device).eval().requires_grad_(False)


class FeatureCache:
    """Captured features of whole sequences on disk, bounded, so that only the first epoch runs the target.

    Flat files of bf16 taps, bf16 hidden states, and fp32 (log normaliser, argmax: exact below 2^24).
    Sequences are placed in order of their index until the bound is reached; the rest is computed each time.

    Args:
        directory: of the cache; its key file says what it was made from.
        lengths: tokens of every sequence, by index.
        tap_width: m·d.
        hidden_size: d.
        max_bytes: bound on the files together.
        key: names target, taps, data and dtype.

    Raises:
        ConfigError: the directory holds the features of something else.
    """

    def __init__(
        self,
        directory: Path,
        lengths: list[int],
        tap_width: int,
        hidden_size: int,
        max_bytes: float,
        key: str,
    ):
        directory.mkdir(parents=True, exist_ok=True)
        meta = directory / "key.json"
        mine = {"key": key, "sequences": len(lengths), "tokens": sum(lengths), "max_bytes": int(max_bytes)}
        if meta.exists() and json.loads(meta.read_text(encoding="utf-8")) != mine:
            raise ConfigError(
                f"data.cache_dir {directory} was made from other data or another target: name a new one"
            )
        meta.write_text(json.dumps(mine), encoding="utf-8")
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        row_bytes = 2 * (tap_width + hidden_size) + 8
        self._count = int(np.searchsorted(self._starts, max_bytes / row_bytes, side="right")) - 1
        rows = max(1, int(self._starts[self._count]))
        self._taps = _memmap(directory / "taps.bf16", np.int16, (rows, tap_width))
        self._hidden = _memmap(directory / "hidden.bf16", np.int16, (rows, hidden_size))
        self._scalars = _memmap(directory / "scalars.f32", np.float32, (rows, 2))
        self._ready = _memmap(directory / "ready.u8", np.uint8, (max(1, self._count),))

    def get(self, index: int) -> Captured | None:
        """Features of one sequence, [1, T, ...], or None when they are not here."""
        if index >= self._count or not self._ready[index]:
            return None
        span = slice(self._starts[index], self._starts[index + 1])
        taps, hidden, scalars = (
            torch.from_numpy(np.array(file[span]))[None] for file in (self._taps, self._hidden, self._scalars)
        )
        return Captured(
            taps.view(torch.bfloat16), hidden.view(torch.bfloat16), scalars[..., 0], scalars[..., 1].long()
        )

    def put(self, index: int, captured: Captured) -> None:
        """Keep one sequence, [1, T, ...]; nothing happens past the bound."""
        if index >= self._count:
            return
        span = slice(self._starts[index], self._starts[index + 1])
        self._taps[span] = captured.taps[0].to("cpu", torch.bfloat16).view(torch.int16).numpy()
        self._hidden[span] = captured.hidden[0].to("cpu", torch.bfloat16).view(torch.int16).numpy()
        scalars = torch.stack([captured.log_normaliser, captured.best.float()], dim=-1)[0]
        self._scalars[span] = scalars.cpu().numpy()
        self._ready[index] = 1


class TargetFeatures:
    """Captured features of a batch, from the cache where it has them, else from the target.

    Args:
        target: the frozen target.
        cache: features of earlier epochs, or None.
    """

    def __init__(self, target: FrozenTarget, cache: FeatureCache | None):
        self._target, self._cache = target, cache

    def of(self, batch: AnchorBatch) -> Captured:
        """Features of every sequence, padded rows zero or garbage."""
        if self._cache is None:
            return self._target.capture(batch)
        found = [self._cache.get(index) for index in batch.indices]
        if any(item is None for item in found):
            captured = self._target.capture(batch)
            for row, index in enumerate(batch.indices):
                length = int(batch.lengths[row])
                self._cache.put(index, _row(captured, row, length))
            return captured
        return _stack([item for item in found if item is not None], batch.ids.shape[1], self._target)


def _row(captured: Captured, row: int, length: int) -> Captured:
    parts = (captured.taps, captured.hidden, captured.log_normaliser, captured.best)
    return Captured(*(part[row : row + 1, :length] for part in parts))


def _stack(items: list[Captured], width: int, target: FrozenTarget) -> Captured:
    """Join [1, T_i, ...] to [B, width, ...], zero padded, in the target's dtype and place."""

    def join(parts: list[Tensor]) -> Tensor:
        padded = parts[0].new_zeros((len(parts), width, *parts[0].shape[2:]))
        for row, part in enumerate(parts):
            padded[row, : part.shape[1]] = part[0]
        return padded.to(target.device)

    return Captured(
        join([item.taps for item in items]).to(target.dtype),
        join([item.hidden for item in items]).to(target.dtype),
        join([item.log_normaliser for item in items]),
        join([item.best for item in items]),
    )


def _memmap(path: Path, dtype: Any, shape: tuple[int, ...]) -> np.memmap:
    mode = "r+" if path.exists() else "w+"
    return np.memmap(path, dtype=dtype, mode=mode, shape=shape)
