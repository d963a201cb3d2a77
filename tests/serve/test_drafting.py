"""Speculation in the running application: prefill, drafters and verifier, seen over HTTP."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving_harness import REPO, RunningApp, wait_until

VERIFIER = "Verifier:smollm2"
MODES = ("fixed_len", "fixed_tau", "tau", "throughput", "tau+throughput")


def shim(app: RunningApp) -> dict[str, Any]:
    """The verifier worker's counters as of its last report."""
    return app.stats(VERIFIER)["workers"]["shim"]


def run_mode_command(app: RunningApp, *arguments: str) -> subprocess.CompletedProcess[str]:
    address = app.drill(Path(__file__).with_name("drills.py"), "ray_address")
    return subprocess.run(
        [sys.executable, "-c", "from dspark_ray.cli import main; main()", "mode", *arguments],
        env={**os.environ, "RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(REPO)},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_the_mode_command_changes_a_running_deployment(app: RunningApp) -> None:
    done = run_mode_command(app, "smollm2", "fixed_tau", "--tau", "0.25")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(": fixed_tau, tau 0.25\n")
    assert app.speculate()[0]["mode"] == "tau+throughput"
    done = run_mode_command(app, "nope", "off")
    assert done.returncode == 2
    assert "model nope: none serves it" in done.stderr


@pytest.fixture
def speculation(app: RunningApp) -> Iterator[RunningApp]:
    """The application, whose speculation is as configured again afterwards."""
    yield app
    app.speculate()


def ask_all(app: RunningApp, prompts: list[str], **options: Any) -> list[str]:
    """Answers to chat prompts, all asked at once."""
    client = app.client()

    def ask(prompt: str) -> str:
        answer = client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": prompt}], **options
        )
        return answer.choices[0].message.content

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, prompts))


def drafts_since(app: RunningApp, before: dict[str, Any]) -> int:
    """Drafts made since, once the worker has reported again."""
    wait_until(lambda: shim(app)["steps"] > before["steps"], 5, "a report of the verifier")
    return int(shim(app)["tokens_drafted"] - before["tokens_drafted"])


@pytest.mark.parametrize("mode", ["off", *MODES])
def test_greedy_text_is_that_of_vllm_alone_in_every_mode(
    speculation: RunningApp, mode: str, prompts: list[str], offline_texts: list[str]
) -> None:
    """Named subset of `served_path.py`, which runs all of it."""
    app = speculation
    assert [answer["mode"] for answer in app.speculate(mode, tau=0.1)] == [mode]
    before = shim(app)
    assert ask_all(app, prompts[:4], temperature=0, max_tokens=64) == offline_texts[:4]
    drafted = drafts_since(app, before)
    assert drafted == 0 if mode == "off" else drafted > 0


def test_seeded_text_does_not_depend_on_speculation(speculation: RunningApp, prompts: list[str]) -> None:
    app = speculation
    options = {"temperature": 0.8, "top_p": 0.95, "seed": 11, "max_tokens": 32}
    texts = {}
    for mode in ("off", "fixed_len"):
        app.speculate(mode)
        texts[mode] = ask_all(app, prompts[4:8], **options)
        assert ask_all(app, prompts[4:5], **options) == texts[mode][:1]
    assert texts["fixed_len"] == texts["off"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", ["chat", "completions", "n", "prompts"])
def test_usage_tells_accepted_and_rejected_drafts(speculation: RunningApp, kind: str, stream: bool) -> None:
    app, client = speculation, speculation.client()
    body: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_tokens": 24, "stream": stream}
    body |= {"extra_body": {"ignore_eos": True}}
    if stream:
        body["stream_options"] = {"include_usage": True}
    question = "Count from one to twenty."
    if kind in ("chat", "n"):
        body["messages"] = [{"role": "user", "content": question}]
        create = client.chat.completions.create
    else:
        body["prompt"] = [question] * (2 if kind == "prompts" else 1)
        create = client.completions.create
    if kind == "n":
        body |= {"n": 2, "temperature": 1.0, "seed": 3}
    several = kind in ("n", "prompts")

    def last() -> Any:
        return list(create(**body))[-1] if stream else create(**body)

    app.speculate("fixed_len")
    answer = last()
    counts = answer.usage.completion_tokens_details
    assert answer.usage.completion_tokens == (48 if several else 24)
    assert counts.accepted_prediction_tokens + counts.rejected_prediction_tokens > 20 * (1 + several)
    assert 0 < counts.accepted_prediction_tokens < answer.usage.completion_tokens
    if not several and not stream:  # vLLM's own figures; it loses a stream's when outputs are merged
        theirs = answer.metrics["speculative_decoding"]
        assert counts.accepted_prediction_tokens == theirs["num_accepted_draft_tokens"]
        assert (
            counts.rejected_prediction_tokens
            == theirs["num_draft_tokens"] - counts.accepted_prediction_tokens
        )
    app.speculate("off")
    counts = last().usage.completion_tokens_details
    assert (counts.accepted_prediction_tokens, counts.rejected_prediction_tokens) == (0, 0)
