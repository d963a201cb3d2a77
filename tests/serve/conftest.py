"""The application that the tests of this folder share, and what vLLM alone says to the same prompts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from offline_reference import answers
from serving_harness import REPO, RunningApp, running_app

PROMPTS = 20
MAX_TOKENS = 64
DATA = Path(__file__).resolve().parent.parent / "data" / "eval_slice.jsonl"
DRAFTER = REPO / "deployments" / "drafters" / "smollm2-135m"

APP_ARGS = {
    "models": [
        {
            "id": "smollm2",
            "target": {
                "source": "demo:smollm2",
                "dtype": "float32",
                "max_model_len_tokens": 4096,
                "max_num_seqs": 8,
                "kv_cache_gib": 0.25,
                "engine": {
                    "enable_auto_tool_choice": True,
                    "tool_call_parser": "hermes",
                    "max_num_batched_tokens": 256,  # longer prompts are prefilled in chunks
                },
            },
            "prefill": {"replicas": 1, "cpu_cores": "0"},
            "drafter": {"placement": "remote", "source": str(DRAFTER)},
            "verifier": {"replicas": 1, "cpu_cores": "1"},
        },
        {
            "id": "small/local",
            "target": {
                "source": "demo:smollm2",
                "dtype": "float32",
                "max_model_len_tokens": 512,
                "max_num_seqs": 2,
                "kv_cache_gib": 0.125,
            },
            "verifier": {"cpu_cores": "0", "max_ongoing_requests": 2, "max_queued_requests": 2},
        },
    ],
    "ingress": {"graceful_shutdown_timeout_s": 30},
    "failover": {"silence_s": 20},
}


@pytest.fixture(scope="session")
def app_args() -> dict[str, Any]:
    """Of the application that is shared."""
    return APP_ARGS


@pytest.fixture(scope="session")
def app(demo_model: Path) -> Iterator[RunningApp]:
    """Two models: one with prefill replica and drafter, one without either."""
    with running_app(APP_ARGS) as app:
        yield app


@pytest.fixture
def bounded_app(demo_model: Path) -> Iterator[RunningApp]:
    """The same two models, whose answers end after four tokens."""
    with running_app(APP_ARGS | {"security": {"max_output_tokens": 4}}) as app:
        yield app


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Some of each set: 20 in all."""
    lines = [json.loads(line)["prompt"] for line in DATA.read_text().splitlines()]
    return lines[:: len(lines) // PROMPTS][:PROMPTS]


@pytest.fixture(scope="session")
def offline_texts(demo_model: Path, prompts: list[str]) -> list[str]:
    """Greedy fp32 answers of vLLM, without Serve, disaggregation or any of our classes."""
    requests = [{"prompt": prompt, "temperature": 0, "max_tokens": MAX_TOKENS} for prompt in prompts]
    return [answer["text"] for answer in answers(demo_model, "float32", requests)]
