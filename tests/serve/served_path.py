"""The served path against plain vLLM and against one process: all of it by one command, printed as JSON.

    python tests/serve/served_path.py texts        greedy and seeded text, every mode, one stream and sixteen
    python tests/serve/served_path.py acceptance   accept length, as `dspark-ray evaluate` measures it

Every request goes over HTTP through prefill, drafter and verifier. Exit status 1 when something differs that may not.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import psutil

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent), str(TESTS / "e2e")]

import offline_reference  # noqa: E402
from serving_harness import REPO, RunningApp, running_app, wait_until  # noqa: E402

from dspark_ray.sources import demo_folder  # noqa: E402

MODES = ("off", "fixed_len", "fixed_tau", "tau", "throughput", "tau+throughput")
TRAINED = REPO / "deployments" / "drafters" / "smollm2-135m"
VERIFIER, PREFILL, DRAFTER = "Verifier:smollm2", "Prefill:smollm2", "Drafter:smollm2"
NEAR_TIE = 0.25
"""Logprobs closer than this may change places in bf16: two steps of a bf16 number between 16 and 32, as logits are."""
WITHIN = 0.02
"""Accept lengths may differ by this share."""
CONTEXT_TOKENS = 512
SMALL_KV_GIB = 0.03
"""Room for 700 tokens: one request of the longest kind, but not sixteen of any."""
SAMPLED = {"temperature": 0.8, "top_p": 0.95}


def committed_prompts(count: int) -> list[str]:
    """Prompts of tests/data; after the last one, all again with another task."""
    lines = (TESTS / "data" / "eval_slice.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    prompts += [f"Repeat the following in your own words.\n\n{prompt}" for prompt in prompts]
    return prompts[:count]


@contextmanager
def drafter_folder(name: str) -> Iterator[Path]:
    """A checkpoint by path, ``trained`` or ``random``."""
    if name != "random":
        yield TRAINED if name == "trained" else Path(name).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        code = f"import target_drafting; target_drafting.make_random_drafter({folder + '/d'!r})"
        subprocess.run([sys.executable, "-c", code], cwd=TESTS / "e2e", check=True, env=_clean_env())
        yield Path(folder) / "d"


def _clean_env() -> dict[str, str]:
    from target_engine import engine_environment

    return engine_environment()


def app_args(
    drafter: Path, dtype: str, *, kv_gib: float = 0.25, engine: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """One model with one replica of each role."""
    model = {
        "id": "smollm2",
        "target": {
            "source": "demo:smollm2", "dtype": dtype, "max_model_len_tokens": CONTEXT_TOKENS, "max_num_seqs": 16,
            "kv_cache_gib": kv_gib, "engine": engine or {},
        },
        "prefill": {"replicas": 1, "cpu_cores": "0"},
        "drafter": {"placement": "remote", "source": str(drafter), **options},
        "verifier": {"cpu_cores": "1"},
        "scheduling": {"mode": "fixed_len"},
    }  # fmt: skip
    return {"models": [model]}


def ask(app: RunningApp, requests: list[dict[str, Any]], streams: int) -> list[dict[str, Any]]:
    """Answers in order: ``text``, ``token_ids``, ``accepted`` and ``verified`` drafts, ``tokens``."""
    client = app.client(timeout=600.0)

    def one(request: dict[str, Any]) -> dict[str, Any]:
        prompt = request["prompt"]
        params = {name: value for name, value in request.items() if name not in ("prompt", "logprobs")}
        answer = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": prompt}],
            extra_body={"return_token_ids": True},
            **params,
        )
        (choice,), usage = answer.choices, answer.usage
        drafts = usage.completion_tokens_details
        accepted, rejected = drafts.accepted_prediction_tokens, drafts.rejected_prediction_tokens
        return {
            "text": choice.message.content, "token_ids": choice.token_ids, "tokens": usage.completion_tokens,
            "accepted": accepted, "verified": accepted + rejected,
        }  # fmt: skip

    with ThreadPoolExecutor(streams) as pool:
        return list(pool.map(one, requests))


def accept_len(answers: list[dict[str, Any]], preemptions: int = 0) -> float:
    """Tokens a round, bonus included; the first token of an answer, and after a preemption, comes without one."""
    tokens = sum(answer["tokens"] - 1 for answer in answers) - preemptions
    return tokens / (tokens - sum(answer["accepted"] for answer in answers))


def difference(expected: dict[str, Any], got: dict[str, Any]) -> dict[str, Any] | None:
    """Where two answers part, and how much less likely plain vLLM found the token that was said instead."""
    if got["text"] == expected["text"] and got["token_ids"] == expected["token_ids"]:
        return None
    pairs = enumerate(zip(expected["token_ids"], got["token_ids"], strict=False))
    position = next((i for i, (a, b) in pairs if a != b), None)
    if position is None or not expected["top"]:
        return {"position": position, "gap": None}
    top = expected["top"][position]
    said = top.get(str(got["token_ids"][position]))
    return {"position": position, "gap": None if said is None else max(top.values()) - said}


def compare_texts(
    *, drafters: list[str], modes: list[str], streams: list[int], prompts: int, tokens: int, dtype: str
) -> dict[str, Any]:
    """Served text against plain vLLM's, offline; a quarter of the prompts also sampled, with seeds."""
    texts = committed_prompts(prompts)
    greedy = [{"prompt": text, "temperature": 0, "max_tokens": tokens, "logprobs": 10} for text in texts]
    seeded = [
        {"prompt": text, "seed": seed, "max_tokens": tokens, **SAMPLED}
        for seed, text in enumerate(texts[::4])
    ]
    requests = greedy + (seeded if dtype == "float32" else [])
    expected = offline_reference.answers(demo_folder(), dtype, requests)
    runs, wrong = [], 0
    for drafter in drafters:
        with drafter_folder(drafter) as folder, running_app(app_args(folder, dtype)) as app:
            for mode in modes:
                app.speculate(mode, tau=0.1)
                for width in streams:
                    began = time.monotonic()
                    got = ask(app, requests, width)
                    parted = [difference(*pair) for pair in zip(expected, got, strict=True)]
                    found = [{"request": i, **where} for i, where in enumerate(parted) if where]
                    far = [one for one in found if one["gap"] is None or one["gap"] > NEAR_TIE]
                    wrong += len(found) if dtype == "float32" else len(far)
                    run = {
                        "drafter": drafter, "mode": mode, "streams": width, "requests": len(got),
                        "identical": len(got) - len(found), "differing": found, "not_near_ties": len(far),
                        "verified": sum(a["verified"] for a in got), "accept_len": accept_len(got),
                        "tokens_per_s": sum(a["tokens"] for a in got) / (time.monotonic() - began),
                    }  # fmt: skip
                    print(json.dumps(run), file=sys.stderr, flush=True)
                    runs.append(run)
    return {"dtype": dtype, "near_tie": NEAR_TIE, "wrong": wrong, "runs": runs}


def compare_acceptance(*, drafter: str, prompts: int, tokens: int, streams: int) -> dict[str, Any]:
    """Accept length in one process, and served under conditions that have broken others."""
    texts = committed_prompts(prompts)
    requests = [{"prompt": text, "temperature": 0, "max_tokens": tokens} for text in texts]
    with drafter_folder(drafter) as folder:
        rounds = _rounds_evaluated(folder, texts, tokens)
        # No deadline: a busy machine is to change nothing here.
        engine = {"max_num_batched_tokens": 96, "block_size": 32, "enable_prefix_caching": True}
        with running_app(app_args(folder, "float32", engine=engine, deadline_ms=10_000.0)) as app:
            answers = ask(app, requests, streams)
            # Of the same tokens: a last round in one process may go past the longest answer, and counts in full.
            result = {"evaluate": sum(answer["tokens"] - 1 for answer in answers) / rounds}
            result["chunked"] = accept_len(answers)
            result["prefix_hits"] = accept_len(ask(app, requests, streams))
            # At the prefill replica: the verifier gets all features from there.
            restored = app.stats(PREFILL)["workers"]["shim"]["prefix_restored"]
            _restart_drafter(app)
            result["drafter_restarted"] = accept_len(ask(app, requests, streams))
        small = {"block_size": 32, "enable_prefix_caching": False}
        args = app_args(folder, "float32", kv_gib=SMALL_KV_GIB, engine=small, deadline_ms=10_000.0)
        with running_app(args) as app:
            answers = ask(app, requests, streams)
            preempted = app.stats(VERIFIER)["requests_preempted"]
            result["preempted"] = accept_len(answers, preempted)
    return {"accept_len": result, "prefix_restored": restored, "preemptions": preempted}


def _rounds_evaluated(drafter: Path, texts: list[str], tokens: int) -> int:
    """Rounds that `dspark-ray evaluate` takes, in one process."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as prompts:
        prompts.writelines(json.dumps({"prompt": text}) + "\n" for text in texts)
        prompts.flush()
        command = [sys.executable, "-c", "from dspark_ray.cli import main; main()", "evaluate"]
        command += ["--target", str(demo_folder()), "--drafter", str(drafter), "--dataset", prompts.name]
        command += ["--max-new-tokens", str(tokens), "--window", "256", "--dtype", "float32", "--json"]
        env = {**os.environ, "PYTHONPATH": str(REPO)}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=env)
        return int(json.loads(done.stdout)["rounds"])


def _restart_drafter(app: RunningApp) -> None:
    """Kill the drafting actor; Ray starts it anew with an empty context cache."""
    killed = app.stats(DRAFTER)["engine_pid"]
    psutil.Process(killed).kill()
    wait_until(lambda: app.stats(DRAFTER)["engine_pid"] != killed, 120, "the drafter's restart")


@click.group()
def main() -> None:
    """Check the served path; see the module."""


def _report(result: dict[str, Any], *, wrong: bool) -> None:
    click.echo(json.dumps(result, indent=2))
    sys.exit(int(wrong))


_PROMPTS = click.option("--prompts", default=100, show_default=True)
_TOKENS = click.option("--tokens", default=64, show_default=True)


@main.command()
@_PROMPTS
@_TOKENS
@click.option("--drafter", "drafters", multiple=True, default=["trained", "random"], show_default=True)
@click.option("--mode", "modes", multiple=True, default=MODES, show_default=True)
@click.option("--streams", multiple=True, type=int, default=[1, 16], show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
def texts(**options: Any) -> None:
    """Compare text with plain vLLM's: identical in float32, but for near-ties in bfloat16."""
    result = compare_texts(**options)
    _report(result, wrong=result["wrong"] > 0)


@main.command()
@_PROMPTS
@_TOKENS
@click.option("--drafter", default="trained", show_default=True)
@click.option("--streams", default=16, show_default=True)
def acceptance(**options: Any) -> None:
    """Compare accept lengths with that of `dspark-ray evaluate`: within 2 %."""
    result = compare_acceptance(**options)
    lengths = result["accept_len"]
    wrong = any(abs(length / lengths["evaluate"] - 1) > WITHIN for length in lengths.values())
    _report(result, wrong=wrong or not result["preemptions"] or not result["prefix_restored"])


if __name__ == "__main__":
    main()
