"""Ordinary calls of ordinary clients, without keys; test_access_http has them with keys."""

import json
import subprocess
from typing import Any

import httpx
from clients import langchain_says
from serving_harness import RunningApp

HELLO = {"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6}


def curl(*arguments: str) -> str:
    return subprocess.run(
        ["curl", "-sS", "--fail-with-body", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


def post(app: RunningApp, body: dict[str, Any]) -> str:
    url = f"{app.base_url}/v1/chat/completions"
    return curl("-N", url, "-H", "Content-Type: application/json", "-d", json.dumps(body))


def test_curl(app: RunningApp) -> None:
    assert [m["id"] for m in json.loads(curl(f"{app.base_url}/v1/models"))["data"]] == [
        "smollm2",
        "small/local",
    ]
    whole = json.loads(post(app, HELLO | {"temperature": 0}))
    events = post(app, HELLO | {"temperature": 0, "stream": True}).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    deltas = [json.loads(e.removeprefix("data: "))["choices"][0]["delta"] for e in events[:-2]]
    assert "".join(d.get("content") or "" for d in deltas) == whole["choices"][0]["message"]["content"] != ""


def test_langchain(app: RunningApp) -> None:
    whole, streamed = langchain_says(f"{app.base_url}/v1", "none", "smollm2")
    assert whole.content == streamed.content != ""
    assert whole.usage_metadata["output_tokens"] == 6
    assert whole.response_metadata["finish_reason"] == "length"


def test_the_openapi_document_is_served(app: RunningApp) -> None:
    document = httpx.get(f"{app.base_url}/openapi.json", timeout=60).json()
    request = document["components"]["schemas"]["ChatCompletionRequest"]
    assert request["properties"]["model"]["enum"] == ["smollm2", "small/local"]
