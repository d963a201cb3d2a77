"""On-policy data: the target answers training prompts itself (dspark-spec section 2).

Prompts are JSON lines, `{"messages": [...]}` in OpenAI's schema or `{"prompt": "..."}`. Answers are token
JSON lines, `{"prompt_ids", "response_ids", "temperature", "finish", "key", ...}`, which training reads. A key
names prompt and temperature, so a run that was killed goes on where it stopped.
"""

import gzip
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_ray.errors import ConfigError
from dspark_ray.hardware import openmp_env

_SENTINEL = "dspark-user-turn-goes-here"


@dataclass(frozen=True)
class Job:
    """One answer to make.

    Attributes:
        key: names prompt and temperature; the same in every run.
        prompt_ids: the rendered prompt.
        temperature: sampling temperature, 0 is greedy.
        labels: what else the prompt's line said (domain, source), copied to the output.
    """

    key: str
    prompt_ids: list[int]
    temperature: float
    labels: dict[str, Any]


def open_text(path: Path) -> Iterator[str]:
    """Lines of a .jsonl or .jsonl.gz file."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        yield from lines


def read_prompts(path: Path, user_template: str) -> Iterator[tuple[list[dict[str, str]], dict[str, Any]]]:
    """Conversations and their labels.

    Args:
        path: JSON lines with `messages` or `prompt`.
        user_template: the last user turn is put where it says `{prompt}`.

    Raises:
        ConfigError: a line with neither field, or a template without `{prompt}`.
    """
    if "{prompt}" not in user_template:
        raise ConfigError("user_template must contain {prompt}")
    for number, line in enumerate(open_text(path), start=1):
        record = json.loads(line)
        if "messages" in record:
            messages = [dict(message) for message in record["messages"]]
        elif "prompt" in record:
            messages = [{"role": "user", "content": record["prompt"]}]
        else:
            raise ConfigError(f"{path}:{number} has neither 'messages' nor 'prompt'")
        messages[-1]["content"] = user_template.replace("{prompt}", messages[-1]["content"])
        yield messages, {name: record[name] for name in ("domain", "source") if name in record}


def plan(
    prompts: Iterator[tuple[list[dict[str, str]], dict[str, Any]]],
    temperatures: tuple[float, ...],
    tokenizer: Any,
    done: set[str],
    max_prompt_tokens: int,
) -> Iterator[Job]:
    """Jobs that are not done yet; the temperatures take turns over the prompts.

    Prompts longer than `max_prompt_tokens` are left out.
    """
    for index, (messages, labels) in enumerate(prompts):
        temperature = temperatures[index % len(temperatures)]
        text = json.dumps([messages, temperature], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        if key in done:
            continue
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        if len(ids) <= max_prompt_tokens:
            yield Job(key, ids, temperature, labels)


def user_turn_prefix(tokenizer: Any) -> list[int]:
    """Token ids of the chat template up to where a user's text starts.

    Sampling from here has the target invent a user turn: prompts from its own distribution.
    """
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": _SENTINEL}], tokenize=False)
    return tokenizer(rendered.split(_SENTINEL)[0], add_special_tokens=False)["input_ids"]


def finished_keys(path: Path) -> set[str]:
    """Keys in an output file; a last line that a kill cut short is removed from the file."""
    if not path.exists():
        return set()
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) != len(raw):
        path.write_bytes(whole)
    return {json.loads(line)["key"] for line in whole.splitlines()}


def start_engine(target: Path, *, max_model_len: int, batch_size: int, dtype: str, seed: int) -> Any:
    """A vLLM engine for offline generation; on CPU its worker gets the fast OpenMP runtime."""
    import torch

    if not torch.cuda.is_available():
        for name, value in {"VLLM_CPU_KVCACHE_SPACE": "1", **openmp_env()}.items():
            os.environ.setdefault(name, value)
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm import LLM

    return LLM(
        model=str(target),
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=batch_size,
        enforce_eager=not torch.cuda.is_available(),
        # vLLM 0.29 on CPU: a seeded request whose prefill is chunked kills the engine
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(4096, max_model_len),
        seed=seed,
    )


def invent_prompts(engine: Any, tokenizer: Any, count: int, max_tokens: int) -> list[str]:
    """`count` user turns sampled from the chat template at temperature 1; empty and cut ones are left out.

    They draw from the engine's own seed: a generator for each would take longer than the model.
    """
    from vllm import SamplingParams

    prefix = {"prompt_token_ids": user_turn_prefix(tokenizer)}
    params = SamplingParams(temperature=1.0, max_tokens=max_tokens)
    outputs = engine.generate([prefix] * count, params, use_tqdm=False)
    texts = [o.outputs[0].text.strip() for o in outputs if o.outputs[0].finish_reason == "stop"]
    return list(dict.fromkeys(text for text in texts if text))


def answer(engine: Any, jobs: list[Job], max_new_tokens: int, seed: int) -> list[dict[str, Any]]:
    """Answer a batch of jobs; each draws from its own seed, taken from its key."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=job.temperature,
            max_tokens=max_new_tokens,
            seed=(seed + int(job.key[:8], 16)) % 2**31 if job.temperature > 0 else None,
            detokenize=False,
        )
        for job in jobs
    ]
    outputs = engine.generate([{"prompt_token_ids": job.prompt_ids} for job in jobs], params, use_tqdm=False)
    return [
        {
            **job.labels,
            "key": job.key,
            "temperature": job.temperature,
            "prompt_ids": job.prompt_ids,
            "response_ids": list(output.outputs[0].token_ids),
            "finish": output.outputs[0].finish_reason,
        }
        for job, output in zip(jobs, outputs, strict=True)
    ]
