"""Token sequences, anchors and the order in which a run sees them.

All of it is a function of (seed, step), so a resumed run needs nothing but its step number.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dspark_ray.errors import ConfigError
from dspark_ray.training.regenerate import open_text


@dataclass(frozen=True)
class Example:
    """One prompt and the target's answer.

    Attributes:
        ids: [T] int64, prompt then answer.
        prompt_len: tokens of the prompt; the rest carries loss.
        temperature: what the answer was sampled at.
        index: its place in the data, which names it in the feature cache.
    """

    ids: Tensor
    prompt_len: int
    temperature: float
    index: int


@dataclass(frozen=True)
class AnchorBatch:
    """B padded sequences and N anchors in each.

    Attributes:
        ids: [B, T] int64, padded with 0.
        lengths: [B] int64.
        prompt_lens: [B] int64.
        anchors: [B, N] int64 absolute positions; padded with the sequence's first answer position.
        valid: [B, N, γ] bool, slot k counts; all false for a padded anchor.
        indices: place of each sequence in the data.
    """

    ids: Tensor
    lengths: Tensor
    prompt_lens: Tensor
    anchors: Tensor
    valid: Tensor
    indices: tuple[int, ...]

    @property
    def token_ids(self) -> Tensor:
        """x_0..x_γ of each block, [B, N, γ+1]; slots past the sequence's end repeat its last token."""
        offsets = torch.arange(self.valid.shape[-1] + 1)
        last = (self.lengths - 1)[:, None, None]
        at = (self.anchors[..., None] + offsets).minimum(last)
        return self.ids.gather(1, at.flatten(1)).view_as(at)


def load_examples(files: Sequence[Path], max_length: int) -> list[Example]:
    """Read token JSON lines; answers of fewer than two tokens hold no anchor and are left out.

    Raises:
        ConfigError: no such file, or a line that lacks prompt_ids or response_ids.
    """
    examples: list[Example] = []
    for path in files:
        if not path.is_file():
            raise ConfigError(f"data.files: no file {path}; `dspark-ray regenerate` makes one")
        for number, line in enumerate(open_text(path), start=1):
            record = json.loads(line)
            try:
                prompt, answer = record["prompt_ids"], record["response_ids"]
            except KeyError as error:
                raise ConfigError(
                    f"{path}:{number} has no {error.args[0]}; run `dspark-ray regenerate`"
                ) from error
            ids = torch.tensor((prompt + answer)[:max_length])
            if len(ids) >= len(prompt) + 2:
                temperature = float(record.get("temperature", 1.0))
                examples.append(Example(ids, len(prompt), temperature, len(examples)))
    return examples


def split_held_out(examples: list[Example], held_out: int, seed: int) -> tuple[list[Example], list[Example]]:
    """(training, held out): a random choice that depends on the seed alone; no prompt is on both sides."""
    by_prompt: dict[tuple[int, ...], list[Example]] = {}
    for example in examples:
        by_prompt.setdefault(tuple(example.ids[: example.prompt_len].tolist()), []).append(example)
    groups = list(by_prompt.values())
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist()
    aside: list[Example] = []
    while order and len(aside) < held_out:
        aside += groups[order.pop()]
    return [example for i in sorted(order) for example in groups[i]], aside


def frequent_tokens(examples: Sequence[Example], size: int, always: Sequence[int]) -> Tensor:
    """A draft vocabulary.

    Args:
        examples: answers to count.
        size: V', tokens wanted.
        always: ids that must be in it (stop tokens).

    Returns:
        Sorted ids [V'] int64. When the answers use fewer than V' tokens, the lowest unused ids fill the rest.
    """
    counts = _answer_counts(examples)
    chosen = list(dict.fromkeys([*always, *(token for token, _ in counts.most_common(size))]))[:size]
    seen = set(chosen)
    filler = (token for token in range(size + len(seen)) if token not in seen)
    chosen += [next(filler) for _ in range(size - len(chosen))]
    return torch.tensor(sorted(chosen))


def covered_share(examples: Sequence[Example], vocabulary: Tensor) -> float:
    """Share of answer tokens that a draft vocabulary [V'] can draft."""
    counts = _answer_counts(examples)
    return sum(counts[token] for token in vocabulary.tolist()) / max(1, counts.total())


def _answer_counts(examples: Sequence[Example]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for example in examples:
        counts.update(example.ids[example.prompt_len :].tolist())
    return counts


def anchor_positions(prompt_len: int, length: int, limit: int, generator: torch.Generator) -> Tensor:
    """At most `limit` anchors, uniform without replacement, sorted.

    An anchor's own and next token both carry loss: the first anchor is the answer's first token.
    """
    candidates = torch.arange(prompt_len, length - 1)
    if len(candidates) > limit:
        candidates = candidates[torch.randperm(len(candidates), generator=generator)[:limit]].sort().values
    return candidates


def step_examples(examples: list[Example], step: int, per_step: int, seed: int) -> list[Example]:
    """The sequences of a step: epochs of fresh permutations, the last incomplete step of each left out."""
    steps_per_epoch = len(examples) // per_step
    if steps_per_epoch == 0:
        raise ConfigError(
            f"data.sequences_per_step {per_step} exceeds the {len(examples)} training sequences"
        )
    epoch, within = divmod(step, steps_per_epoch)
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed + epoch))
    return [examples[i] for i in order[within * per_step : (within + 1) * per_step].tolist()]


def make_batch(examples: Sequence[Example], block_size: int, limit: int, seed: int) -> AnchorBatch:
    """Pad sequences and choose their anchors.

    Args:
        examples: B sequences.
        block_size: γ.
        limit: most anchors a sequence.
        seed: of the choice of anchors; mixed with each sequence's index.
    """
    chosen = [
        anchor_positions(
            example.prompt_len,
            len(example.ids),
            limit,
            torch.Generator().manual_seed(seed * 1_000_003 + example.index),
        )
        for example in examples
    ]
    batch, count, width = len(examples), max(map(len, chosen)), max(len(e.ids) for e in examples)
    ids = torch.zeros(batch, width, dtype=torch.int64)
    anchors = torch.tensor([[e.prompt_len] for e in examples]).repeat(1, count)
    real = torch.zeros(batch, count, dtype=torch.bool)
    for row, (example, positions) in enumerate(zip(examples, chosen, strict=True)):
        ids[row, : len(example.ids)] = example.ids
        anchors[row, : len(positions)] = positions
        real[row, : len(positions)] = True
    lengths = torch.tensor([len(example.ids) for example in examples])
    inside = anchors[..., None] + torch.arange(1, block_size + 1) < lengths[:, None, None]
    prompt_lens = torch.tensor([example.prompt_len for example in examples])
    indices = tuple(example.index for example in examples)
    return AnchorBatch(ids, lengths, prompt_lens, anchors, inside & real[..., None], indices)
