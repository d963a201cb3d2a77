"""A tiny Llama target on disk and runs that train a drafter for it."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dspark_ray.training.config import TrainConfig

VOCAB = 48
STOP = 2


def save_target(folder: Path) -> Path:
    """4 layers, hidden 32, weights large enough that its greedy text is not one token for ever."""
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        eos_token_id=STOP,
        bos_token_id=1,
        pad_token_id=STOP,
        initializer_range=0.25,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load_target(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Plain greedy decoding, one whole forward a token."""
    tokens: list[int] = []
    while len(tokens) < count and (not tokens or tokens[-1] != STOP):
        ids = torch.tensor([prompt + tokens])
        tokens.append(int(model(input_ids=ids, use_cache=False).logits[0, -1].argmax()))
    return tokens


def write_answers(path: Path, model: Any, prompts: list[list[int]], count: int) -> Path:
    """Token JSON lines with the target's own greedy answers."""
    lines = [
        {"prompt_ids": prompt, "response_ids": greedy(model, prompt, count), "temperature": 0.0}
        for prompt in prompts
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def random_prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 9, (count,), generator=generator).tolist()
    return [torch.randint(4, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def run_config(target: Path, run_dir: Path, answers: Path, **changes: Any) -> TrainConfig:
    """A run in fp32; `changes` are merged one level deep."""
    raw: dict[str, Any] = {
        "target": str(target),
        "run_dir": str(run_dir),
        "compute_dtype": "float32",
        "threads": 1,
        "log_every_steps": 2,
        "validate_every_steps": 1000,
        "draft": {"block_size": 4, "target_layer_ids": [0, 2], "mask_token_id": 3, "markov_rank": 8},
        "optimizer": {"lr": 3e-3, "steps": 6},
        "data": {"files": [str(answers)], "held_out": 0, "sequences_per_step": 4},
    }
    for name, value in changes.items():
        raw[name] = {**raw[name], **value} if isinstance(value, dict) and name in raw else value
    return TrainConfig.model_validate(raw)
