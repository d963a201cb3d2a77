"""Answers that outlive their verifier: killed or hung in the middle of them, they end as if nothing had been."""

import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from serving_harness import RunningApp, wait_until
from test_failures import LONG, VERIFIER, engine_worker, is_idle

TOKENS = 120
BEGUN = 6
CHAT = {"model": "smollm2", "messages": [{"role": "user", "content": "Tell me a long story about a robot."}]}
PROMPT = {"model": "smollm2", "prompt": "Naïve café, 日本語, 🙂. The end of the story: Once"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
STREAMS = {
    "greedy": CHAT
    | {"temperature": 0, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 1},
    "seeded": PROMPT | {"seed": 7, "temperature": 1.0, "top_p": 0.9, "stop": ["§§"], "logprobs": 1},
    "chunked": PROMPT
    | {"prompt": LONG, "seed": 8, "temperature": 1.3, "min_tokens": 100, "return_token_ids": True},
    "penalised": PROMPT | {"frequency_penalty": 0.5},
    "tools": CHAT | {"tools": [TOOL], "tool_choice": "auto"},
}
CONTINUED = ("greedy", "seeded", "chunked")


class Listener:
    """One client and what it has read so far."""

    def __init__(self, app: RunningApp, body: dict[str, Any]):
        self._app = app
        self._body = body | {"max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        self.lines: list[str] = []
        self.begun = threading.Event()

    def listen(self) -> list[str]:
        """Read the stream to its end."""
        path = "/v1/chat/completions" if "messages" in self._body else "/v1/completions"
        with httpx.stream("POST", self._app.base_url + path, json=self._body, timeout=400) as response:
            for line in response.iter_lines():
                if line:
                    self.lines.append(line)
                if len(self.lines) > BEGUN:
                    self.begun.set()
        return self.lines


def read(lines: list[str]) -> dict[str, Any]:
    """What a client makes of a stream."""
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    speech = [choice.get("delta", choice) for choice in choices]
    tokens: list[Any] = []
    for logprobs in filter(None, (choice.get("logprobs") for choice in choices)):
        tokens += [(entry["token"], round(entry["logprob"], 2)) for entry in logprobs.get("content", [])]
        if "tokens" in logprobs:
            each = zip(logprobs["tokens"], logprobs["text_offset"], logprobs["token_logprobs"], strict=True)
            tokens += [(token, offset, round(logprob, 2)) for token, offset, logprob in each]
    return {
        "text": "".join(part.get("content") or part.get("text") or "" for part in speech),
        "roles": [part["role"] for part in speech if "role" in part],
        "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "usage": [chunk["usage"] for chunk in chunks if chunk.get("usage")],
        "ids": [token for choice in choices for token in choice.get("token_ids") or []],
        "prompt_ids": [choice["prompt_token_ids"] for choice in choices if choice.get("prompt_token_ids")],
        "tokens": tokens,
    }


def whole_answer(app: RunningApp) -> dict[str, Any]:
    body = PROMPT | {"seed": 9, "temperature": 1.0, "max_tokens": 2 * TOKENS, "ignore_eos": True, "n": 2}
    answer = httpx.post(f"{app.base_url}/v1/completions", json=body, timeout=400)
    assert answer.status_code == 200, answer.text
    # How many drafts were accepted on the way may differ: the answer and its size may not.
    usage = {
        name: count for name, count in answer.json()["usage"].items() if name != "completion_tokens_details"
    }
    return {"texts": [choice["text"] for choice in answer.json()["choices"]], "usage": usage}


@pytest.mark.slow  # waits for Serve to start another replica
@pytest.mark.timeout(900)
def test_a_killed_engine_ends_no_answer_that_can_be_continued(app: RunningApp) -> None:
    answers_outlive_a_kill(app)


def answers_outlive_a_kill(app: RunningApp) -> None:
    """Kill the verifier's engine in the middle of several answers and read them to their ends."""
    wait_until(lambda: is_idle(app), 20, "idle before the test")
    killed = app.stats(VERIFIER)["pid"]
    with ThreadPoolExecutor(len(STREAMS) + 1) as pool:
        bodies = [STREAMS[name] for name in CONTINUED]
        whole_streams = pool.map(lambda body: read(Listener(app, body).listen()), bodies)
        expected = dict(zip(CONTINUED, whole_streams, strict=True))
        expected_whole = whole_answer(app)
        clients = {name: Listener(app, body) for name, body in STREAMS.items()}
        whole = pool.submit(whole_answer, app)
        streams = {name: pool.submit(client.listen) for name, client in clients.items()}
        for client in clients.values():
            assert client.begun.wait(60)
        engine_worker(app, VERIFIER).kill()
        heard = {name: len(client.lines) for name, client in clients.items()}
        lines = {name: stream.result() for name, stream in streams.items()}
        assert whole.result() == expected_whole, "nothing of it had been said"
    assert app.stats(VERIFIER)["pid"] != killed
    for name in CONTINUED:
        assert heard[name] < len(lines[name]) - 10, f"{name} was over before the kill"
        assert read(lines[name]) == expected[name], name
    for name in set(STREAMS) - set(CONTINUED):
        error = json.loads(lines[name][-2].removeprefix("data: "))["error"]
        assert (error["type"], error["code"], error["retry_after_s"]) == ("server_error", "replica_died", 1.0)
        assert lines[name][-1] == "data: [DONE]"
    wait_until(lambda: is_idle(app), 20, "idle after the test")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["engine", "replica"])
def test_a_hung_verifier_ends_no_answer(app: RunningApp, part: str) -> None:
    """Stopped, not killed: the engine's replica ends itself; Serve ends a replica that is stopped."""
    body, verifier = PROMPT | {"model": "small/local", "seed": 3}, "Verifier:small--local"
    expected = read(Listener(app, body).listen())
    stopped = psutil.Process(app.stats(verifier)["pid"])
    client = Listener(app, body)
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(client.listen)
        assert client.begun.wait(60)
        process = engine_worker(app, verifier) if part == "engine" else stopped
        process.send_signal(signal.SIGSTOP)
        try:
            assert read(stream.result()) == expected
        finally:
            if process.is_running():
                process.send_signal(signal.SIGCONT)
    wait_until(lambda: not stopped.is_running(), 120, "the hung replica gone")
