"""The training loop: frozen target, many anchors a forward, fp32 masters, exact resume, data parallel.

Ranks (torchrun) split the sequences of a step and add up their gradients; since every term has one global
denominator, any number of ranks computes the same step.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from dspark_ray.drafter.checkpoint import load_drafter, save_drafter
from dspark_ray.drafter.model import DraftConfig, DSparkModel
from dspark_ray.errors import ConfigError
from dspark_ray.training.config import LossConfig, LossWeights, OptimizerConfig, TrainConfig, target_folder
from dspark_ray.training.data import (
    AnchorBatch,
    Example,
    covered_share,
    frequent_tokens,
    load_examples,
    make_batch,
    split_held_out,
    step_examples,
)
from dspark_ray.training.frozen_target import FeatureCache, FrozenTarget, TargetFeatures
from dspark_ray.training.initialise import draft_config, initialise_from_target
from dspark_ray.training.run_state import (
    append_json_line,
    fingerprint_of,
    load_state,
    provenance,
    save_state,
    sha256_of,
    write_json,
)
from dspark_ray.training.step import Sums, add_sums, batch_loss, readable, slot_weight_sum, target_to_draft


def learning_rate(step: int, optimizer: OptimizerConfig) -> float:
    """The rate of a step (0-based): linear warm-up, constant, cosine to 0; never above the peak."""
    warmup = max(1, round(optimizer.warmup_fraction * optimizer.steps))
    decay = max(1, round(optimizer.decay_fraction * optimizer.steps))
    rise = min(1.0, (step + 1) / warmup)
    progress = max(0.0, (step - (optimizer.steps - decay)) / decay)
    return optimizer.lr * rise * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def loss_weights(step: int, steps: int, loss: LossConfig) -> LossWeights:
    """Weights of a step: linear from `start` to `end` over the curriculum."""
    done = min(1.0, step / (loss.curriculum_fraction * steps))
    mixed = {
        name: (1 - done) * getattr(loss.start, name) + done * getattr(loss.end, name)
        for name in ("ce", "kl", "tv")
    }
    return LossWeights(**mixed)


class Trainer:
    """One rank of a run.

    Args:
        config: the run.
        rank: of this process.
        world: number of processes; with more than one, torch.distributed must be initialised.
    """

    def __init__(self, config: TrainConfig, rank: int = 0, world: int = 1):
        self.config, self.rank, self.world = config, rank, world
        if config.data.sequences_per_step % world:
            raise ConfigError(f"data.sequences_per_step must be a multiple of the {world} ranks")
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self.dtype = getattr(torch, config.compute_dtype)
        shape, data = config.draft, config.data
        self.target_folder = target_folder(config.target)
        self.target = FrozenTarget(self.target_folder, shape.target_layer_ids, self.dtype, config.device)
        examples = load_examples(data.files, data.max_length)
        self.examples, self.held_out = split_held_out(examples, data.held_out, config.seed)
        self.model, self.coverage = self._new_model()
        self.examples = self.examples[: data.max_sequences]
        self.to_draft = target_to_draft(self.model)
        if rank:
            dist.barrier()  # rank 0 makes the cache's files
        self.features = TargetFeatures(self.target, self._cache(examples))
        if world > 1 and not rank:
            dist.barrier()
        self.names, self.parameters = zip(*self.model.named_parameters(), strict=True)
        rates = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=rates.lr, betas=rates.betas, weight_decay=rates.weight_decay, fused=True
        )
        self.average = [p.detach().clone() for p in self.parameters] if rates.ema_decay else None
        self.step = 0
        # the schedule may change on resume (train longer); what is trained on what may not
        self.fingerprint = fingerprint_of(
            {
                **config.model_dump(mode="json", include={"target", "draft", "seed"}),
                "data": self._data_hashes(),
            }
        )
        if self.state_path.exists():
            self._resume()

    @property
    def state_path(self) -> Path:
        """Where the resume state is."""
        return self.config.run_dir / "state.safetensors"

    def run(self, until: int | None = None) -> None:
        """Train to the end of the schedule, or to step `until`."""
        config = self.config
        last = config.optimizer.steps if until is None else min(until, config.optimizer.steps)
        config.run_dir.mkdir(parents=True, exist_ok=True)
        if not self.rank:
            write_json(config.run_dir / "provenance.json", self._provenance())
        saved = logged = time.monotonic()
        window, anchors = {}, 0
        while self.step < last:
            sums, norm = self.train_step()
            window = add_sums(window, sums)
            anchors += int(sums["count"][0]) if sums else 0
            self.step += 1
            now = time.monotonic()
            if self.step % config.log_every_steps == 0 and window:
                window["terms"] = window["terms"] / config.log_every_steps
                self._log(
                    "train",
                    window,
                    anchors_per_s=round(anchors / (now - logged), 1),
                    grad_norm=round(norm, 4),
                )
                window, anchors, logged = {}, 0, now
            if self.held_out and (self.step % config.validate_every_steps == 0 or self.step == last):
                self._log("validation", self.validate())
                logged = time.monotonic()
            if now - saved > config.save_every_s or self.step == last:
                self.save()
                saved = logged = time.monotonic()

    def train_step(self) -> tuple[Sums, float]:
        """One optimiser step; returns its metrics over all ranks and the gradient norm before clipping."""
        config, rates = self.config, self.config.optimizer
        batches = list(self.batches(self.step))
        denominator = self._all_sum(
            torch.tensor(sum(slot_weight_sum(b, config.loss.position_decay) for b in batches))
        )
        weights = loss_weights(self.step, rates.steps, config.loss)
        totals: Sums = {}
        for batch in batches:
            loss, sums = self._loss(batch, weights, float(denominator))
            loss.backward()
            totals = add_sums(totals, sums)
        self._reduce_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, rates.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, rates)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            # early on, an average over the steps so far
            decay = min(rates.ema_decay or 0.0, (1 + self.step) / (10 + self.step))
            torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 - decay)
        return {name: self._all_sum(value) for name, value in totals.items()}, float(norm)

    def batches(self, step: int) -> Iterator[AnchorBatch]:
        """This rank's batches of a step."""
        config, data = self.config, self.config.data
        mine = step_examples(self.examples, step, data.sequences_per_step, config.seed)[
            self.rank :: self.world
        ]
        mine = sorted(mine, key=lambda example: len(example.ids))
        for start in range(0, len(mine), data.sequences_per_forward):
            yield self._batch(mine[start : start + data.sequences_per_forward], seed=config.seed + 1 + step)

    @torch.no_grad()
    def validate(self) -> Sums:
        """Metrics on greedy held-out answers (all if none is greedy), with averaged weights if there are."""
        chosen = [example for example in self.held_out if example.temperature == 0] or self.held_out
        batches = [self._batch([example], seed=0) for example in chosen]
        denominator = sum(slot_weight_sum(batch, self.config.loss.position_decay) for batch in batches)
        totals: Sums = {}
        with self.averaged_weights():
            for batch in batches:
                totals = add_sums(totals, self._loss(batch, self.config.loss.end, denominator)[1])
        return totals

    def save(self) -> None:
        """Write the resume state and the drafter as it is now."""
        if self.rank:
            return
        tensors = {f"model.{n}": p for n, p in zip(self.names, self.parameters, strict=True)}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"optimizer.{key}.{name}"] = value
        for name, value in zip(self.names, self.average or [], strict=self.average is not None):
            tensors[f"average.{name}"] = value
        save_state(self.state_path, tensors, self.step, self.fingerprint)
        with self.averaged_weights():
            save_drafter(
                self.model,
                self.config.run_dir / "drafter",
                dtype=torch.bfloat16,
                verifier=self.target_folder.name,
            )
        write_json(self.config.run_dir / "drafter" / "provenance.json", self._provenance())

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Within it the model has the averaged weights, if the run keeps them."""
        if self.average is None:
            yield
            return
        own = [parameter.data for parameter in self.parameters]
        for parameter, value in zip(self.parameters, self.average, strict=True):
            parameter.data = value
        try:
            yield
        finally:
            for parameter, value in zip(self.parameters, own, strict=True):
                parameter.data = value

    def _new_model(self) -> tuple[DSparkModel, float]:
        """The drafter, initialised from the target, and the share of answer tokens that it can draft."""
        config = self.config
        shape = draft_config(config.draft, self.target.config)
        if config.draft.init_from is not None:
            model = self._earlier_model(config.draft.init_from, shape)
        else:
            vocabulary = None
            if shape.reduced_vocabulary:
                stops = self.target.config.eos_token_id
                stops = [stops] if isinstance(stops, int) else list(stops or [])
                vocabulary = frequent_tokens(self.examples, shape.draft_vocab_size, stops)
            model = DSparkModel(shape).to(config.device)
            initialise_from_target(model, self.target, self.examples[0].ids[None])
            model.attach_target(self.target.embed_weight, self.target.lm_head_weight, vocabulary)
        model.lm_head_weight = model.lm_head_weight.to(self.dtype)  # not cast anew in every forward
        return model, covered_share(self.examples, model.draft_to_target)

    def _earlier_model(self, path: Path, shape: DraftConfig) -> DSparkModel:
        model = load_drafter(path, target=self.target_folder, dtype=torch.float32, device=self.config.device)
        if model.config != shape:
            raise ConfigError(f"draft.init_from {path} has another shape than this run's draft section")
        return model.requires_grad_(True).train()

    def _cache(self, examples: list[Example]) -> FeatureCache | None:
        data, width = self.config.data, self.target.config.hidden_size
        if data.cache_dir is None:
            return None
        taps = self.config.draft.target_layer_ids
        key = fingerprint_of({"target": self.config.target, "taps": taps, "data": self._data_hashes()})
        lengths = [len(example.ids) for example in examples]
        return FeatureCache(data.cache_dir, lengths, len(taps) * width, width, data.cache_gb * 1e9, key)

    def _data_hashes(self) -> dict[str, str]:
        return {path.name: sha256_of(path) for path in self.config.data.files}

    def _batch(self, examples: list[Example], seed: int) -> AnchorBatch:
        return make_batch(
            examples, self.model.config.num_draft_tokens, self.config.data.anchors_per_sequence, seed
        )

    def _loss(self, batch: AnchorBatch, weights: LossWeights, denominator: float) -> tuple[Tensor, Sums]:
        captured = self.features.of(batch)
        mixed = self.dtype != torch.float32
        with torch.autocast(torch.device(self.config.device).type, dtype=self.dtype, enabled=mixed):
            return batch_loss(
                self.model, batch, captured, self.config.loss, weights, denominator, self.to_draft
            )

    def _all_sum(self, value: Tensor) -> Tensor:
        if self.world > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def _reduce_gradients(self) -> None:
        if self.world == 1:
            return
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
        dist.all_reduce(flat)
        for parameter, part in zip(
            self.parameters, flat.split([p.numel() for p in self.parameters]), strict=True
        ):
            parameter.grad.copy_(part.view_as(parameter))

    def _resume(self) -> None:
        tensors, self.step = load_state(self.state_path, self.fingerprint)
        with torch.no_grad():
            for name, parameter in zip(self.names, self.parameters, strict=True):
                parameter.copy_(tensors[f"model.{name}"])
                state = {key: tensors[f"optimizer.{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq")}
                self.optimizer.state[parameter] = {
                    key: value.to(parameter.device if key != "step" else value.device)
                    for key, value in state.items()
                }
            for name, value in zip(self.names, self.average or [], strict=self.average is not None):
                value.copy_(tensors.get(f"average.{name}", tensors[f"model.{name}"]))

    def _provenance(self) -> dict[str, object]:
        made = provenance(self.config.model_dump(mode="json"), self.config.data.files)
        return {**made, "step": self.step, "draft_vocabulary_coverage": round(self.coverage, 5)}

    def _log(self, kind: str, sums: Sums, **extra: float) -> None:
        if self.rank:
            return
        record = {"kind": kind, "step": self.step, "time": round(time.time(), 1), **extra, **readable(sums)}
        append_json_line(self.config.run_dir / "metrics.jsonl", record)


def run_training(config: TrainConfig, rank: int, world: int) -> None:
    """Train to the end of the schedule as one rank of `world` (torchrun's environment when more than 1)."""
    if world == 1:
        Trainer(config).run()
        return
    backend = "nccl" if config.device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world)
    try:
        Trainer(config, rank, world).run()
    finally:
        dist.destroy_process_group()
