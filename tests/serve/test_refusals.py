"""Wrong requests get a 4xx in OpenAI's shape, streamed or not, and the next request works."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from serving_harness import RunningApp

CHAT, COMPLETIONS, MODEL = "/v1/chat/completions", "/v1/completions", "smollm2"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
PROMPT = {"model": MODEL, "prompt": "Hello", "max_tokens": 4}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}

WRONG = {
    "unknown model": (CHAT, HELLO | {"model": "nope"}, 404, "model"),
    "adapter of a known model": (CHAT, HELLO | {"model": "smollm2:mine"}, 404, "model"),
    "no model": (CHAT, {"messages": HELLO["messages"]}, 400, "model"),
    "negative max_tokens": (CHAT, HELLO | {"max_tokens": -1}, 400, "max_tokens"),
    "no messages": (CHAT, HELLO | {"messages": []}, 400, None),
    "prompt longer than the context": (COMPLETIONS, PROMPT | {"prompt": "word " * 5000}, 400, None),
    "answer longer than the context": (COMPLETIONS, PROMPT | {"max_tokens": 5000}, 400, None),
    "token out of the vocabulary": (COMPLETIONS, PROMPT | {"prompt": [99_999_999]}, 400, None),
    "no prompt": (COMPLETIONS, PROMPT | {"prompt": []}, 400, None),
    "too many answers": (CHAT, HELLO | {"n": 1000}, 400, "n"),
    "temperature below 0": (CHAT, HELLO | {"temperature": -1}, 400, "temperature"),
    "temperature not a number": (CHAT, HELLO | {"temperature": "nan"}, 400, "temperature"),
    "schema that is none": (CHAT, HELLO | {"response_format": SCHEMA}, 400, None),
    "addresses of our memory": (
        CHAT, HELLO | {"kv_transfer_params": {"do_remote_prefill": True}}, 400, "kv_transfer_params",
    ),
    "our own arguments": (CHAT, HELLO | {"vllm_xargs": {"dspark_request_uuid": "x"}}, 400, "vllm_xargs"),
    "not an object": (CHAT, [HELLO], 400, None),
}  # fmt: skip


def check_shape(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"] is None or isinstance(error["code"], str)
    return error


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("path", "body", "status", "param"), WRONG.values(), ids=WRONG)
def test_wrong_input(app: RunningApp, path: str, body, status: int, param: str | None, stream: bool) -> None:
    if isinstance(body, dict):
        body = body | {"stream": stream}
    error = check_shape(httpx.post(app.base_url + path, json=body, timeout=60), status)
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param


def test_bodies_that_are_no_json_or_too_large(app: RunningApp) -> None:
    def post(content) -> httpx.Response:
        return httpx.post(app.base_url + CHAT, content=content, timeout=60)

    check_shape(post(b'{"model": "smollm2", '), 400)
    check_shape(post(b"\xff\xfe"), 400)
    check_shape(post(b'{"model": "smollm2", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), 400)
    big = json.dumps(PROMPT | {"prompt": "x" * 2_000_000}).encode()
    assert check_shape(post(big), 413)["code"] == "request_too_large"
    chunks = (big[start : start + 65_536] for start in range(0, len(big), 65_536))
    check_shape(post(chunks), 413)  # chunked: no length announced
    check_shape(httpx.post(f"{app.base_url}/v1/nothing", json={}), 404)
    check_shape(httpx.get(app.base_url + CHAT), 405)


def test_the_official_client_raises_its_own_errors_and_goes_on(app: RunningApp) -> None:
    client = app.client()
    failed = app.stats("Verifier:smollm2")["remote_prefills"].get("failed", 0)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**HELLO | {"model": "nope"})
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**PROMPT | {"prompt": "word " * 5000}, stream=True)
    assert caught.value.code == "context_length_exceeded"
    assert client.chat.completions.create(**HELLO).usage.completion_tokens == 4
    assert app.stats("Verifier:smollm2")["remote_prefills"].get("failed", 0) == failed


def test_overload_is_503_with_retry_after_before_the_first_byte(app: RunningApp) -> None:
    request = {"model": "small/local", "prompt": "Once", "max_tokens": 60, "stream": True, "ignore_eos": True}

    def post(_: int) -> tuple[httpx.Response, str]:
        response = httpx.post(app.base_url + COMPLETIONS, json=request, timeout=120)
        return response, response.text

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(post, range(12)))
    served = [text for response, text in answers if response.status_code == 200]
    refused = [response for response, _ in answers if response.status_code != 200]
    assert len(served) >= 2
    assert refused
    assert all(text.rstrip().endswith("data: [DONE]") and '"error"' not in text for text in served)
    for response in refused:
        assert check_shape(response, 503)["code"] == "overloaded"
        assert int(response.headers["retry-after"]) >= 1
