"""Prompts to offer: small slices of public evaluation sets, or any JSON lines file."""

import json
from pathlib import Path

from dspark_ray.errors import ConfigError

FOLDER = Path(__file__).parent / "data"
SETS = ("gsm8k", "mbpp", "mt-bench")
MIXED = "mixed"


def load_prompts(dataset: str) -> list[str]:
    """The prompts of a data set, in a fixed order.

    Args:
        dataset: one of SETS, ``mixed`` (all of them by turns), or a JSON lines file whose lines have ``prompt``,
            ``turns`` (the first one counts) or ``messages`` (the last one counts).

    Raises:
        ConfigError: no such set or file, or a line without a prompt.
    """
    if dataset == MIXED:
        return [prompt for row in zip(*map(load_prompts, SETS), strict=True) for prompt in row]
    path = FOLDER / f"{dataset}.jsonl" if dataset in SETS else Path(dataset)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(
            f"--dataset: {dataset} is neither a file ({error.strerror}) nor one of {', '.join([*SETS, MIXED])}"
        ) from None
    prompts = [
        _prompt(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()
    ]
    if not prompts:
        raise ConfigError(f"{path}: no prompts")
    return prompts


def _prompt(line: str, where: str) -> str:
    try:
        record = json.loads(line)
        if "prompt" in record:
            return str(record["prompt"])
        if "turns" in record:
            return str(record["turns"][0])
        return str(record["messages"][-1]["content"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise ConfigError(f"{where}: a JSON object with prompt, turns or messages is needed") from None
