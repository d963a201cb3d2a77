"""What a draft costs: ``python -m dspark_ray.bench.drafter``.

Prints JSON: milliseconds of one draft call for several batch and block sizes, and how they divide into lm_head,
Markov loop (with the confidence head), context append, and draft layers. With ``--engine`` a real vLLM engine of
the target decodes in the same process between the measurements, and the ratio of a draft to one of its steps at
batch 1 is printed. Without a checkpoint the weights are random, of the demo drafter's shape.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from dspark_ray.drafter.checkpoint import load_drafter
from dspark_ray.drafter.model import DraftConfig, DSparkModel
from dspark_ray.drafter.runner import DraftItem, DraftRunner
from dspark_ray.hardware import openmp_env
from dspark_ray.sources import DEMO_SOURCE, resolve_source

BATCHES, BLOCKS = (1, 4, 16, 64), (5, 7)
WINDOW = 256
NEW_FEATURES = 3  # rows a round commits: about an accept length
WARM_UP_CALLS = 10
ENGINE_TURNS, ENGINE_TOKENS = 7, 48


def random_model() -> DSparkModel:
    """A drafter for SmolLM2-135M: 2 layers, draft vocabulary 8192, Markov rank 64."""
    config = DraftConfig(
        hidden_size=576,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=49152,
        draft_vocab_size=8192,
        block_size=max(BLOCKS),
        mask_token_id=3,
        target_layer_ids=(3, 14, 26),
        num_target_layers=30,
        target_hidden_size=576,
        markov_rank=64,
        enable_confidence_head=True,
    )
    torch.manual_seed(0)
    model = DSparkModel(config)
    model.attach_target(torch.randn(49152, 576) * 0.02, torch.randn(8192, 576) * 0.02, torch.arange(8192))
    return model


class DraftLoad:
    """A steady load of B requests whose contexts have different lengths, each a few tokens further every call."""

    def __init__(self, runner: DraftRunner, batch: int):
        self._runner = runner
        d = runner.model.config.hidden_size
        self._features = torch.randn(WINDOW, d, dtype=runner.model.dtype)
        self._ends = [40 + (97 * row) % WINDOW for row in range(batch)]
        items = [DraftItem(str(row), 0, self._features[:end], 1, 0) for row, end in enumerate(self._ends)]
        runner.draft([*items])

    def call(self, draft_len: int) -> None:
        """One draft call for the whole batch."""
        items = [
            DraftItem(str(row), end, self._features[:NEW_FEATURES], 17, draft_len)
            for row, end in enumerate(self._ends)
        ]
        self._ends = [end + NEW_FEATURES for end in self._ends]
        self._runner.draft(items)


def milliseconds(call: Callable[[], Any], repeats: int) -> float:
    """Median wall time of a call."""
    for _ in range(WARM_UP_CALLS):
        call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times)


class PartTimer:
    """Times a model's methods inside real draft calls, where their weights are as cold as they are there."""

    def __init__(self, model: DSparkModel, names: tuple[str, ...]):
        self._seconds: dict[str, list[float]] = {name: [] for name in names}
        for name in names:
            setattr(model, name, self._timed(name, getattr(DSparkModel, name).__get__(model)))

    def milliseconds(self, name: str, last: int) -> float:
        """Median of the last calls."""
        return 1e3 * statistics.median(self._seconds[name][-last:])

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = method(*arguments)
            self._seconds[name].append(time.perf_counter() - started)
            return result

        return call


def measure(runner: DraftRunner, timer: PartTimer, batch: int, block: int, repeats: int) -> dict[str, float]:
    """Milliseconds of one call and its parts' shares; `layers` is what the other parts leave of the call."""
    load = DraftLoad(runner, batch)
    append = milliseconds(lambda: load.call(0), repeats)
    total = milliseconds(lambda: load.call(block), repeats)
    lm_head, rollout = timer.milliseconds("base_logits", repeats), timer.milliseconds("rollout", repeats)
    runner.free([str(row) for row in range(batch)])
    parts = {"lm_head": lm_head, "markov": rollout - lm_head, "append": append}
    parts["layers"] = total - rollout - append
    shares = {f"{name}_share": round(ms / total, 3) for name, ms in parts.items()}
    return {"batch": batch, "block_size": block, "draft_ms": round(total, 3), **shares}


def engine_ratio(target: str, runner: DraftRunner, threads: int, dtype: str) -> dict[str, float]:
    """A draft at B = 1, γ = 5 against one decode step of a vLLM engine, measured in turns."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=target,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=4,
        kv_cache_memory_bytes=256 << 20,
        enable_prefix_caching=False,
    )
    engine_threads = torch.get_num_threads()
    prompt = {"prompt_token_ids": list(range(100, 164))}

    def seconds(tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        started = time.perf_counter()
        engine.generate([prompt], params, use_tqdm=False)
        return time.perf_counter() - started

    seconds(8)
    load, steps, drafts = DraftLoad(runner, 1), [], []
    for _ in range(ENGINE_TURNS):
        torch.set_num_threads(engine_threads)
        # The difference leaves prefill and the call's own overhead out.
        steps.append(1e3 * (seconds(1 + ENGINE_TOKENS) - seconds(1)) / ENGINE_TOKENS)
        torch.set_num_threads(threads)
        drafts.append(milliseconds(lambda: load.call(5), 40))
    step, draft = statistics.median(steps), statistics.median(drafts)
    return {
        "engine_step_ms": round(step, 3),
        "draft_ms": round(draft, 3),
        "draft_to_step": round(draft / step, 3),
    }


def _enter_engine_environment() -> None:
    """Start this process again with what a CPU engine wants, which takes effect only at start-up."""
    wanted = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        **openmp_env(),
    }
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        arguments = [sys.executable, "-m", "dspark_ray.bench.drafter", *sys.argv[1:]]
        os.execve(sys.executable, arguments, {**os.environ, **wanted})  # noqa: S606 - ourselves again


@click.command()
@click.option(
    "--checkpoint", type=click.Path(path_type=Path), help="Draft checkpoint; random weights when unset."
)
@click.option("--target", default=DEMO_SOURCE, show_default=True, help="Folder of the target model.")
@click.option("--dtype", default="bfloat16", type=click.Choice(["bfloat16", "float32"]), show_default=True)
@click.option("--threads", default=1, show_default=True, help="Threads of the drafter.")
@click.option("--repeats", default=60, show_default=True, help="Calls per figure.")
@click.option("--engine", is_flag=True, help="Also measure a vLLM decode step of the target.")
def main(
    checkpoint: Path | None, target: str, dtype: str, threads: int, repeats: int, *, engine: bool
) -> None:
    """Measure the drafter."""
    if engine:
        _enter_engine_environment()
    torch.set_num_threads(threads)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    model = (
        load_drafter(checkpoint, target=Path(resolve_source(target, "--target")))
        if checkpoint
        else random_model()
    )
    runner = DraftRunner(
        model, cache_bytes=256 << 20, window=WINDOW, max_batch=max(BATCHES), device="cpu", dtype=torch_dtype
    )
    blocks = [block for block in BLOCKS if block <= model.config.num_draft_tokens]
    report: dict[str, Any] = {"weights": str(checkpoint or "random"), "dtype": dtype, "threads": threads}
    if engine:
        report["engine"] = engine_ratio(resolve_source(target, "--target"), runner, threads, dtype)
        torch.set_num_threads(threads)
    timer = PartTimer(runner.model, ("base_logits", "rollout"))
    report["drafts"] = [
        measure(runner, timer, batch, block, max(repeats // max(1, batch // 4), 5))
        for batch in BATCHES
        for block in blocks
    ]
    click.echo(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
