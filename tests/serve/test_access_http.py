"""Keys and limits through Serve's own HTTP proxy and a replica process, as clients meet them."""

import hashlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import yaml
from clients import langchain_says
from openapi_examples import play
from serving_harness import running_app

ENV_KEY, SMALL_KEY, SLOW_KEY = (
    "sk-env-0123456789abcdef",
    "sk-small-0123456789abcdef",
    "sk-slow-0123456789abcdef",
)
HELLO = {"model": "small", "messages": [{"role": "user", "content": "Hello"}]}
CHAT = "/v1/chat/completions"
CLIENTS: list[openai.OpenAI] = []


def entry(name: str, key: str, **fields: object) -> dict[str, object]:
    return {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), **fields}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    keys = [
        entry("small", SMALL_KEY, models=["small"], limits={"concurrent_requests": 1}),
        entry("slow", SLOW_KEY, limits={"requests_per_minute": 1, "burst_requests": 2}),
    ]
    key_file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    key_file.write_text(yaml.safe_dump({"keys": keys}))
    target = {"source": "demo:smollm2"}
    args = {
        "models": [{"id": "small", "target": target}, {"id": "large", "target": target}],
        "security": {
            "api_keys_env": "TEST_API_KEYS",
            "api_keys_file": str(key_file),
            "max_output_tokens": 500,
        },
    }
    driver = Path(__file__).with_name("access_driver.py")
    with running_app(args, driver, TEST_API_KEYS=ENV_KEY) as app:
        yield app.base_url
        for one in CLIENTS:
            one.close()


def client(url: str, key: str) -> openai.OpenAI:
    # Kept, since one that is collected unclosed is a warning in whatever test runs just then.
    CLIENTS.append(openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60))
    return CLIENTS[-1]


def test_a_stranger_is_refused_and_a_key_admits(url):
    refused = httpx.post(url + CHAT, json=HELLO, timeout=60)
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "missing_api_key"
    assert refused.headers["www-authenticate"] == 'Bearer realm="dspark-ray"'
    with pytest.raises(openai.AuthenticationError):
        client(url, "sk-wrong-0123456789abcdef").models.list()
    assert httpx.get(f"{url}/health", timeout=60).status_code == 200
    for key in (ENV_KEY, SMALL_KEY):
        answer = client(url, key).chat.completions.create(**HELLO)
        assert answer.choices[0].message.content == "hello, at most None", "without a limit, the engine's"


def test_curl_streams(url):
    body = json.dumps(HELLO | {"stream": True, "max_tokens": 2})
    headers = ["-H", f"Authorization: Bearer {ENV_KEY}", "-H", "Content-Type: application/json"]
    done = subprocess.run(
        ["curl", "-sN", url + CHAT, *headers, "-d", body],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.count("hello") == 2
    assert done.stdout.endswith("data: [DONE]\n\n")


def test_langchain_and_the_openapi_document_with_a_key(url):
    whole, streamed = langchain_says(f"{url}/v1", SMALL_KEY, "small")
    assert (whole.content, streamed.content) == ("hello, at most 6", "hello " * 6)
    with pytest.raises(openai.AuthenticationError):
        langchain_says(f"{url}/v1", "sk-wrong-0123456789abcdef", "small")
    refused = httpx.get(f"{url}/openapi.json", timeout=60)
    assert refused.status_code == 401
    for key, models in ((SMALL_KEY, ["small"]), (ENV_KEY, ["small", "large"])):
        headers = {"Authorization": f"Bearer {key}"}
        document = httpx.get(f"{url}/openapi.json", headers=headers, timeout=60).json()
        request = document["components"]["schemas"]["ChatCompletionRequest"]
        assert request["properties"]["model"]["enum"] == models
        assert request["properties"]["max_completion_tokens"]["anyOf"][0]["maximum"] == 500


def test_a_hundred_examples_of_the_openapi_document(url):
    statuses = play(url, 1, ENV_KEY)
    assert min(statuses[200], statuses[400]) > 10, statuses


def test_a_key_is_held_to_its_models_and_the_bounds(url):
    with pytest.raises(openai.PermissionDeniedError) as refused:
        client(url, SMALL_KEY).chat.completions.create(**HELLO | {"model": "large"})
    assert refused.value.code == "model_not_allowed"
    client(url, ENV_KEY).chat.completions.create(**HELLO | {"model": "large"})
    for key, models in ((SMALL_KEY, ["small"]), (ENV_KEY, ["small", "large"])):
        assert [model.id for model in client(url, key).models.list()] == models
    with pytest.raises(openai.NotFoundError):
        client(url, SMALL_KEY).models.retrieve("large")
    with pytest.raises(openai.BadRequestError) as refused:
        client(url, ENV_KEY).chat.completions.create(**HELLO, max_completion_tokens=501)
    assert refused.value.param == "max_completion_tokens"


def test_rate_limit(url):
    slow = client(url, SLOW_KEY)
    slow.chat.completions.create(**HELLO)
    slow.chat.completions.create(**HELLO)
    with pytest.raises(openai.RateLimitError) as refused:
        slow.chat.completions.create(**HELLO)
    assert 30 < int(refused.value.response.headers["retry-after"]) <= 60


@pytest.mark.parametrize("ends", ["read to its end", "client goes away"])
def test_a_stream_holds_its_slot_until_it_is_over(url, ends):
    small = client(url, SMALL_KEY)
    stream = small.chat.completions.create(
        **HELLO, stream=True, max_tokens=20 if ends == "read to its end" else 500
    )
    next(stream)
    with pytest.raises(openai.RateLimitError) as refused:
        small.chat.completions.create(**HELLO)
    assert refused.value.code == "concurrency_limit_exceeded"
    if ends == "read to its end":
        assert len(list(stream)) == 19
    else:
        stream.close()  # 25 s before its end
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        try:
            small.chat.completions.create(**HELLO)
            break
        except openai.RateLimitError:
            time.sleep(0.1)
    else:
        pytest.fail("the slot of a finished stream is still taken")
