"""One tiny target and its greedy answers, made once."""

from pathlib import Path

import pytest
from tiny_training import load_target, random_prompts, save_target, write_answers


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("tiny-target"))


@pytest.fixture(scope="session")
def answers(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    return write_answers(path, load_target(target), random_prompts(12), 24)
