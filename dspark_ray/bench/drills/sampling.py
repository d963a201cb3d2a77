"""Requests whose every sampling parameter is random say what plain vLLM says."""

import asyncio
import contextlib
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from dspark_ray.bench.drills.deployment import LONGEST_TOKENS, MODEL, Deployment
from dspark_ray.bench.drills.drill import Drill, Fault
from dspark_ray.bench.drills.traffic import Case, Outcome, Traffic, cases, http_client
from dspark_ray.hardware import openmp_env
from dspark_ray.sources import DEMO_SOURCE, resolve_source

REQUESTS = 80
START_PATIENCE_S = 300.0
LOGPROB_TOLERANCE = 2e-3
WORDS = (" the", " and", ".", "\n", " is", ",", "er", "0")


def random_request(rng: random.Random, prompt: str) -> dict[str, Any]:
    """One completions request; sampled ones have a seed, without which there is nothing to compare."""
    longest = rng.randint(1, 32)
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": longest, "temperature": 0.0}
    if rng.random() < 0.7:
        body |= {"temperature": rng.choice((0.2, 0.7, 1.0, 1.5)), "seed": rng.randrange(1 << 31)}
    options: dict[str, Any] = {
        "top_p": rng.choice((0.1, 0.5, 0.9, 0.99)),
        "top_k": rng.choice((1, 2, 20, 200)),
        "min_p": rng.choice((0.01, 0.1, 0.5)),
        "frequency_penalty": rng.uniform(-2, 2),
        "presence_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.uniform(0.7, 1.6),
        "logit_bias": {
            str(rng.randrange(20, 49152)): rng.uniform(-100, 20) for _ in range(rng.randint(1, 5))
        },
        "stop": rng.sample(WORDS, rng.randint(1, 3)),
        "include_stop_str_in_output": True,
        "stop_token_ids": [rng.randrange(49152) for _ in range(20)],
        "min_tokens": rng.randint(0, longest),
        "ignore_eos": True,
        "bad_words": [word.strip() or "the" for word in rng.sample(WORDS, 2)],
        "logprobs": rng.randint(0, 5),
        "n": rng.randint(2, 3),
        "echo": True,
        "skip_special_tokens": False,
    }
    return body | {name: value for name, value in options.items() if rng.random() < 0.2}


def differences(ours: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """What differs in two answers to one request."""
    found = []
    for mine, theirs in zip(ours["choices"], plain["choices"], strict=True):
        found += [
            f"{name}: {mine[name]!r} instead of {theirs[name]!r}"
            for name in ("text", "finish_reason", "stop_reason")
            if mine.get(name) != theirs.get(name)
        ]
        scores, expected = mine.get("logprobs") or {}, theirs.get("logprobs") or {}
        if scores.get("tokens") != expected.get("tokens"):
            found.append(f"tokens of logprobs: {scores.get('tokens')} instead of {expected.get('tokens')}")
            continue
        pairs = zip(scores.get("token_logprobs") or [], expected.get("token_logprobs") or [], strict=True)
        if not all(_close(a, b) for a, b in pairs):
            found.append(f"{scores['token_logprobs']} instead of {expected['token_logprobs']}")
    if ours["usage"]["completion_tokens"] != plain["usage"]["completion_tokens"]:
        found.append(f"usage: {ours['usage']} instead of {plain['usage']}")
    return found


def _close(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=LOGPROB_TOLERANCE, abs_tol=LOGPROB_TOLERANCE)


@contextlib.contextmanager
def plain_vllm() -> Iterator[str]:
    """The same model in fp32 in a vLLM without any of our code; yields its URL."""
    from dspark_ray.serving.ports import free_port_range

    port = free_port_range()
    env = os.environ | {
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **openmp_env(),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port),
        "--model", resolve_source(DEMO_SOURCE, "model"), "--served-model-name", MODEL, "--dtype", "float32",
        "--max-model-len", str(LONGEST_TOKENS), "--max-num-seqs", "8", "--enforce-eager",
        "--kv-cache-memory-bytes", str(1 << 28),
    ]  # fmt: skip
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:  # noqa: S603
        try:
            _wait_healthy(f"http://127.0.0.1:{port}", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _wait_healthy(url: str, process: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + START_PATIENCE_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise RuntimeError("plain vLLM did not start")


def compare(deployment: Deployment, traffic: Traffic, _known: Sequence[Case]) -> Fault:
    """Send the same random requests to the deployment and to plain vLLM."""
    rng = random.Random(11)  # noqa: S311
    prompts = [case.body["prompt"] for case in cases(24) if "prompt" in case.body]
    bodies = [random_request(rng, rng.choice(prompts)) for _ in range(REQUESTS)]

    async def answers(url: str) -> list[tuple[int, dict[str, Any]]]:
        seats = asyncio.Semaphore(4)

        async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            async with seats, asyncio.timeout(START_PATIENCE_S):
                response = await client.post("/v1/completions", json=body)
                return response.status_code, response.json()

        async with http_client(url) as client:
            return await asyncio.gather(*(one(client, body) for body in bodies))

    with plain_vllm() as url:
        plain = traffic.run(answers(url))
    ours = traffic.run(answers(deployment.base_url))
    now = time.monotonic()
    outcomes = []
    refused = 0
    for body, (status, answer), (plain_status, plain_answer) in zip(bodies, ours, plain, strict=True):
        refused += plain_status != 200
        if status != plain_status:
            detail = f"{status} instead of {plain_status}: {json.dumps(body)} {json.dumps(answer)[:300]}"
            outcomes.append(Outcome(False, now, now, "failed", detail))
        elif status == 200 and (found := differences(answer, plain_answer)):
            outcomes.append(Outcome(False, now, now, "wrong", f"{found} {json.dumps(body)}"))
        else:
            outcomes.append(Outcome(False, now, now, "ok"))
    return Fault(outcomes=outcomes, notes={"compared": REQUESTS, "refused by both or one": refused})


SAMPLING_DRILLS = (Drill("random sampling parameters", compare, clients=1),)
