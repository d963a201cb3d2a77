"""Speculative decoding on one page: draft → schedule → verify → accept → commit, one request, one process.

The distributed path is held against this. The target is a Hugging Face causal language model; the rest is
what deployments use. Symbols: s the anchor's position · ℓ verify length · A accepted drafts.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click
import torch
from torch import Tensor

from dspark_ray.config import Exactness
from dspark_ray.decoding.acceptance import SeededChance, verify_coupled, verify_ratio
from dspark_ray.decoding.calibration import CalibrationTable, Scaling, survivals
from dspark_ray.decoding.commit import commit, verify_limit
from dspark_ray.decoding.prefix_scheduler import LengthRule, check_lossless, schedule
from dspark_ray.decoding.sampling import probabilities, to_target_vocabulary
from dspark_ray.drafter.checkpoint import load_drafter
from dspark_ray.drafter.model import DSparkModel, argmax_choice
from dspark_ray.drafter.runner import DraftItem, DraftRunner
from dspark_ray.errors import RequestError
from dspark_ray.sources import resolve_source

_LENGTH_RULES: dict[str, LengthRule] = {"fixed_len": "fixed_len", "fixed_tau": "survival_threshold"}


class HFTarget:
    """A Hugging Face causal language model with its KV cache and the features a drafter taps.

    Args:
        model: the target, in eval mode.
        drafter: says which layers to tap and projects them; None for plain decoding.
    """

    def __init__(self, model: Any, drafter: DSparkModel | None):
        from transformers import DynamicCache

        self._model, self._drafter = model, drafter
        self._cache = (
            DynamicCache()
        )  # without a config: every layer keeps all positions, so it can be truncated

    @torch.inference_mode()
    def extend(self, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Feed n tokens; return logits [n, V] and context features [n, d] ([n, 0] without a drafter)."""
        ids = torch.tensor([list(token_ids)], device=self._model.device)
        tap = self._drafter is not None
        out = self._model(ids, cache=self._cache, use_cache=True, output_hidden_states=tap)
        if self._drafter is None:
            return out.logits[0], out.logits.new_zeros(len(token_ids), 0)
        taps = [out.hidden_states[layer + 1][0] for layer in self._drafter.config.target_layer_ids]
        return out.logits[0], self._drafter.project(torch.cat(taps, dim=-1))

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on."""
        if (surplus := self._cache.get_seq_length() - length) > 0:
            self._cache.crop(-surplus)


@dataclass(frozen=True)
class Decoding:
    """How one request is decoded."""

    max_new_tokens: int = 128
    max_model_len: int = 2048
    stop_token_ids: Collection[int] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    exactness: Exactness = "coupled"
    """coupled and ratio draft by argmax; probabilistic samples drafts from q and keeps q."""
    mode: Literal["fixed_len", "fixed_tau"] = "fixed_len"
    tau: float = 0.0
    block_size: int | None = None
    """γ'; the checkpoint's when None."""
    confidence_scaling: Scaling | None = None
    """Of the checkpoint's calibration."""

    def distribution(self, logits: Tensor) -> Tensor:
        """What a token is drawn from, [..., V] fp32."""
        return probabilities(logits, self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


@dataclass
class Tally:
    """What happened, round by round."""

    verify_lens: list[int] = field(default_factory=list)
    accept_lens: list[int] = field(default_factory=list)

    @property
    def accept_length(self) -> float:
        """Mean tokens of a round: A + 1."""
        return 1 + sum(self.accept_lens) / max(len(self.accept_lens), 1)

    @property
    def waste(self) -> float:
        """Share of verified drafts that were rejected."""
        verified = sum(self.verify_lens)
        return (verified - sum(self.accept_lens)) / verified if verified else 0.0


def speculate(
    target: HFTarget, runner: DraftRunner | None, prompt_ids: Sequence[int], how: Decoding, tally: Tally
) -> Iterator[list[int]]:
    """Decode one request and yield the tokens of each round; plain decoding when there is no runner.

    Raises:
        ExactnessError: drafts would be sampled and cut by a confidence head that has seen them.
        RequestError: the prompt leaves no room in the context.
    """
    if runner is not None:
        check_lossless(
            how.exactness,
            confidence_head_type=runner.model.config.confidence_head_type,
            length_rules=[_LENGTH_RULES[how.mode]],
        )
    budget = min(how.max_new_tokens, how.max_model_len - len(prompt_ids))
    if budget < 1:
        raise RequestError(f"the prompt's {len(prompt_ids)} tokens fill the context of {how.max_model_len}")
    chance = {use: SeededChance(how.seed, use) for use in ("target", "draft", "acceptance", "replacement")}
    logits, features = target.extend(prompt_ids)
    base, s = 0, len(prompt_ids)
    anchor = chance["target"].draws(how.distribution(logits[-1]), s)
    done = commit([anchor], stop_token_ids=how.stop_token_ids, remaining_tokens=budget)
    emitted = 1
    yield done.token_ids
    while done.finish_reason is None:
        # Draft: append the features of what was committed last, then run a block behind the anchor.
        limit = verify_limit(how.max_model_len, s, budget - emitted)
        drafts, confidence_logits, q = _draft(runner, base, features, anchor, limit, how, chance["draft"])
        # Schedule: how many drafts are worth verifying.
        survival = survivals(confidence_logits, how.confidence_scaling).tolist()
        (verify_len,) = schedule([survival], mode=how.mode, tau=how.tau)
        drafts = drafts[:verify_len]
        # Verify: the anchor and the drafts in one pass of the target.
        logits, features = target.extend([anchor, *drafts])
        p = how.distribution(logits)
        # Accept.
        if how.exactness == "coupled":
            verdict = verify_coupled(p, drafts, s, target=chance["target"])
        else:
            acceptance, replacement = chance["acceptance"], chance["replacement"]
            verdict = verify_ratio(p, drafts, q, s, acceptance=acceptance, replacement=replacement)
        tally.verify_lens.append(verify_len)
        tally.accept_lens.append(verdict.accept_len)
        # Commit: anchor and accepted drafts have become context; what follows them is the next anchor.
        kept = verdict.accept_len + 1
        target.truncate(s + kept)
        base, s, features, anchor = s, s + kept, features[:kept], verdict.next_token_id
        done = commit(
            [*drafts[: verdict.accept_len], anchor],
            stop_token_ids=how.stop_token_ids,
            remaining_tokens=budget - emitted,
        )
        emitted += len(done.token_ids)
        yield done.token_ids


def _draft(
    runner: DraftRunner | None,
    base: int,
    features: Tensor,
    anchor: int,
    limit: int,
    how: Decoding,
    chance: SeededChance,
) -> tuple[list[int], list[float], Tensor | None]:
    """Drafted ids, their confidence logits, and q [γ', V] when drafts are sampled (None: argmax)."""
    if runner is None:
        return [], [], None
    model, q_rows = runner.model, list[Tensor]()
    first = base + len(features) + 1

    def sample(logits: Tensor, slot: int) -> Tensor:
        q = how.distribution(logits)
        q_rows.append(to_target_vocabulary(q[0], model.draft_to_target, model.config.vocab_size))
        return torch.tensor([chance.draws(q[0], first + slot)], device=logits.device)

    length = min(limit, how.block_size or model.config.num_draft_tokens)
    item = DraftItem("reference", base, features, anchor, length, fresh=base == 0)
    sampled = how.exactness == "probabilistic"
    result = runner.draft([item], choose=sample if sampled else argmax_choice)
    drafts, confidence = result.draft_token_ids[0, :length], result.confidence_logits[0, :length]
    return drafts.tolist(), confidence.tolist(), torch.stack(q_rows) if q_rows else None


def build_runner(model: DSparkModel, *, window: int = 256) -> DraftRunner:
    """A runner for one request, of the model's own dtype and device."""
    weight = model.norm.weight
    return DraftRunner(
        model, cache_bytes=1 << 28, window=window, max_batch=1, device=weight.device, dtype=weight.dtype
    )


@click.command("generate")
@click.option("--target", required=True, help="Folder or Hugging Face id of the target, or demo:smollm2.")
@click.option("--drafter", required=True, help="Folder of the draft checkpoint.")
@click.option("--prompt", required=True, help="What the user says.")
@click.option("--max-new-tokens", default=128, show_default=True, type=click.IntRange(1))
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0))
@click.option("--top-p", default=1.0, show_default=True, type=click.FloatRange(0, 1, min_open=True))
@click.option("--seed", default=0, show_default=True)
@click.option("--exactness", default="coupled", type=click.Choice(["coupled", "ratio", "probabilistic"]))
@click.option(
    "--tau", default=None, type=click.FloatRange(0, 1), help="Verify drafts that survive this likely."
)
@click.option("--dtype", default="float32", type=click.Choice(["float32", "bfloat16"]))
def generate_command(
    target: str,
    drafter: str,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    exactness: Exactness,
    tau: float | None,
    dtype: str,
) -> None:
    """Answer a prompt by speculative decoding in one process, and compare it with plain decoding."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

    target, drafter = resolve_source(target, "--target"), resolve_source(drafter, "--drafter")
    tokenizer = AutoTokenizer.from_pretrained(target)
    language_model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype)).eval()
    model = load_drafter(Path(drafter), target=Path(target), dtype=language_model.dtype)
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    table = CalibrationTable.load(Path(drafter))
    block_size = model.config.num_draft_tokens
    how = Decoding(
        max_new_tokens=max_new_tokens,
        max_model_len=language_model.config.max_position_embeddings,
        stop_token_ids=_stop_ids(language_model),
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        exactness=exactness,
        mode="fixed_len" if tau is None else "fixed_tau",
        tau=tau or 0.0,
        confidence_scaling=table and table.scaling_for(exactness, temperature, block_size),
    )
    streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    tally, speculative_s, tokens = Tally(), 0.0, []
    started = time.perf_counter()
    for block in speculate(HFTarget(language_model, model), build_runner(model), ids, how, tally):
        tokens += block
        streamer.put(torch.tensor(block))
    speculative_s = time.perf_counter() - started
    streamer.end()
    started = time.perf_counter()
    plain = [t for block in speculate(HFTarget(language_model, None), None, ids, how, Tally()) for t in block]
    plain_s = time.perf_counter() - started
    click.echo(
        f"{len(tokens)} tokens in {len(tally.accept_lens)} rounds: accept length {tally.accept_length:.2f}, "
        f"waste {tally.waste:.0%}\n"
        f"{len(tokens) / speculative_s:.1f} tokens/s, plain decoding {len(plain) / plain_s:.1f} tokens/s"
        f"{', same text' if plain == tokens else ''}"
    )


def _stop_ids(language_model: Any) -> frozenset[int]:
    stop = language_model.generation_config.eos_token_id
    return frozenset([stop] if isinstance(stop, int) else stop or [])
