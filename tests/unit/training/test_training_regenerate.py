"""Planning and resuming of regeneration; the engine itself is vLLM's."""

import json
from pathlib import Path
from typing import Any

import pytest

from dspark_ray.errors import ConfigError
from dspark_ray.training.config import load_train_config
from dspark_ray.training.regenerate import finished_keys, plan, read_prompts, user_turn_prefix


class LetterTokenizer:
    """One token a character, and a template with marks around each turn."""

    def apply_chat_template(
        self, messages: Any, *, tokenize: bool, add_generation_prompt: bool = False
    ) -> str:
        text = "".join(f"<{m['role'][0]}>{m['content']}</>" for m in messages)
        return text + "<a>" * add_generation_prompt

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}


def test_a_cut_line_is_removed_and_finished_answers_are_not_made_again(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        json.dumps({"prompt": "one", "domain": "math"})
        + "\n"
        + json.dumps({"messages": [{"role": "user", "content": "two"}]})
        + "\n"
        + json.dumps({"prompt": "x" * 100})
        + "\n"
    )
    tokenizer = LetterTokenizer()

    def jobs(done: set[str]) -> list[Any]:
        return list(plan(read_prompts(prompts, "{prompt}!"), (0.0, 0.7), tokenizer, done, 50))

    first = jobs(set())
    assert [(job.temperature, bytes(job.prompt_ids).decode()) for job in first] == [
        (0.0, "<u>one!</><a>"),
        (0.7, "<u>two!</><a>"),
    ]
    assert first[0].labels == {"domain": "math"}
    output = tmp_path / "answers.jsonl"
    output.write_text(json.dumps({"key": first[0].key}) + "\n" + json.dumps({"key": first[1].key})[:9])
    done = finished_keys(output)
    assert done == {first[0].key}
    assert output.read_text().endswith("\n")
    assert [job.key for job in jobs(done)] == [first[1].key]
    assert finished_keys(tmp_path / "none.jsonl") == set()


def test_user_turn_prefix_stops_where_the_user_speaks() -> None:
    assert bytes(user_turn_prefix(LetterTokenizer())).decode() == "<u>"


def test_bad_input_names_the_field(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n')
    with pytest.raises(ConfigError, match=r"x\.jsonl:1 has neither"):
        list(read_prompts(path, "{prompt}"))
    with pytest.raises(ConfigError, match="user_template"):
        list(read_prompts(path, "no place"))
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps({"target": "t", "run_dir": "r", "optimizer": {"steps": 5, "rate": 1}}))
    with pytest.raises(ConfigError, match=r"optimizer\.rate"):
        load_train_config(config)
    with pytest.raises(ConfigError, match="must look like name=value"):
        load_train_config(config, ("optimizer.lr",))


def test_shipped_recipes_are_valid() -> None:
    folder = Path(__file__).resolve().parents[3] / "deployments/drafters"
    recipes = sorted(folder.glob("*.toml"))
    assert [path.stem for path in recipes] == ["qwen3-8b", "smollm2-135m"]
    for path in recipes:
        load_train_config(path)
