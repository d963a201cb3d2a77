"""The door in front of the ingress: keys, limits, bounds."""

import asyncio
import hashlib
import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import click.testing
import httpx
import openai
import pytest
import yaml
from fastapi import FastAPI, Request
from hypothesis import given
from hypothesis import strategies as st

from dspark_ray.cli import main
from dspark_ray.config import KeyLimits, SecurityConfig
from dspark_ray.errors import ConfigError, RequestError
from dspark_ray.serving import api_keys
from dspark_ray.serving.access import AccessMiddleware, check_request
from dspark_ray.serving.api_keys import FILE_CHECK_INTERVAL_S, KeyStore, TokenBucket

ALICE, BOB, EVE = "sk-alice-0123456789abcdef", "sk-bob-0123456789abcdef", "sk-eve-0123456789abcdef"
ENV_KEYS = SecurityConfig(api_keys_env="KEYS")
TICKS_NS = itertools.count(1_700_000_000 * 10**9, 10**9)
ENVIRON = {"KEYS": f"{ALICE}, {BOB}"}


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def entry(key: str, **fields: object) -> dict[str, object]:
    return {"name": key.split("-")[1], "sha256": hashlib.sha256(key.encode()).hexdigest(), **fields}


def write_keys(path: Path, *entries: dict[str, object]) -> SecurityConfig:
    path.write_text(yaml.safe_dump({"keys": list(entries)}))
    # A rewrite within one tick of the file system's clock must still count as a change.
    os.utime(path, ns=(next(TICKS_NS),) * 2)
    return SecurityConfig(api_keys_file=str(path))


def bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


def echo_app() -> FastAPI:
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> dict[str, object]:
        return {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [],
                "who": request.state.principal.name}  # fmt: skip

    @app.get("/health")
    async def health() -> str:
        return "ok"

    return app


def sdk(security: SecurityConfig, key: str, clock: Clock | None = None) -> openai.AsyncOpenAI:
    app = echo_app()
    app.add_middleware(AccessMiddleware, security=security, environ=ENVIRON, clock=clock or Clock())
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x")
    return openai.AsyncOpenAI(api_key=key, base_url="http://x/v1", http_client=http, max_retries=0)


async def ask(client: openai.AsyncOpenAI, text: str = "hi") -> object:
    return await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])


async def test_the_openai_sdk_sees_401_and_429_as_its_own_errors(caplog):
    caplog.set_level("DEBUG")
    limited = ENV_KEYS.model_copy(update={"key_limits": KeyLimits(requests_per_minute=40, burst_requests=2)})
    clock = Clock()
    with pytest.raises(openai.AuthenticationError) as refused:
        await ask(sdk(limited, EVE))
    assert refused.value.code == "invalid_api_key"
    assert refused.value.response.headers["www-authenticate"].startswith("Bearer")

    client = sdk(limited, ALICE, clock)
    await ask(client)
    await ask(client)
    with pytest.raises(openai.RateLimitError) as refused:
        await ask(client, "my secret question")
    assert refused.value.code == "rate_limit_exceeded"
    retry_after_s = int(refused.value.response.headers["retry-after"])
    assert retry_after_s == 2
    clock.now_s += retry_after_s
    await ask(client)
    assert not any(text in caplog.text for text in (ALICE, BOB, EVE, "secret question"))


async def test_without_configured_keys_everybody_shares_the_default_limits():
    clock = Clock()
    client = sdk(SecurityConfig(key_limits=KeyLimits(requests_per_minute=60, burst_requests=1)), "any", clock)
    assert (await ask(client)).who == "anonymous"
    with pytest.raises(openai.RateLimitError):
        await ask(client)
    assert (await client._client.get("/health")).status_code == 200


async def drive(app: AccessMiddleware, key: str, **scope: object) -> list[dict[str, object]]:
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        raise AssertionError("a refused request's body must not be read")

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    headers = [(b"authorization", bearer(key))]
    await app({"type": "http", "path": "/v1/models", "headers": headers, **scope}, receive, send)
    return sent


@pytest.mark.parametrize("header", [b"", b"Bearer", b"Bearer  ", b"Basic " + ALICE.encode(), ALICE.encode()])
def test_anything_but_a_bearer_token_is_a_missing_key(header):
    with pytest.raises(RequestError) as refused:
        KeyStore(ENV_KEYS, ENVIRON, Clock()).authenticate(header)
    assert (refused.value.status, refused.value.code) == (401, "missing_api_key")


async def test_refusal_needs_no_body_and_covers_websockets():
    async def app(scope, receive, send):
        raise AssertionError("must not be reached")

    door = AccessMiddleware(app, ENV_KEYS, ENVIRON, Clock())
    assert (await drive(door, EVE))[0]["status"] == 401
    assert await drive(door, EVE, type="websocket") == [{"type": "websocket.close", "code": 1008}]


def test_every_key_is_compared_whichever_matches(monkeypatch):
    store = KeyStore(ENV_KEYS, ENVIRON, Clock())
    compared = []

    def counting(left: bytes, right: bytes) -> bool:
        compared.append(left)
        return left == right

    monkeypatch.setattr(api_keys.hmac, "compare_digest", counting)
    for key in (ALICE, BOB):
        compared.clear()
        store.authenticate(bearer(key))
        assert len(compared) == 2


@pytest.mark.parametrize("end", ["returns", "fails", "cancelled"])
async def test_a_stream_holds_its_slot_until_it_is_over(end):
    running, finish = asyncio.Event(), asyncio.Event()

    async def app(scope, receive, send):
        running.set()
        await finish.wait()
        if end == "fails":
            raise RuntimeError("broken replica")

    security = ENV_KEYS.model_copy(update={"key_limits": KeyLimits(concurrent_requests=1)})
    door = AccessMiddleware(app, security, ENVIRON, Clock())
    stream = asyncio.create_task(drive(door, ALICE))
    await running.wait()
    refusal = await drive(door, ALICE)
    assert refusal[0]["status"] == 429
    assert (b"retry-after", b"1") in refusal[0]["headers"]
    bobs = asyncio.create_task(drive(door, BOB))
    await asyncio.sleep(0)
    assert not bobs.done(), "another key has slots of its own"
    if end == "cancelled":
        stream.cancel()
    finish.set()
    await asyncio.gather(stream, bobs, return_exceptions=True)
    assert await asyncio.gather(drive(door, ALICE), return_exceptions=True) != refusal
    assert all(principal.ongoing == 0 for _, principal in door._keys._principals.values())


@given(
    rate=st.floats(0.1, 50),
    burst=st.integers(1, 10),
    gaps=st.lists(st.floats(0, 3), min_size=1, max_size=60),
)
def test_no_window_admits_more_than_burst_plus_rate(rate, burst, gaps):
    bucket = TokenBucket(rate, burst, burst, 0.0)
    now_s, admitted = 0.0, []
    for gap in gaps:
        now_s += gap
        wait_s = bucket.wait_s(now_s)
        if wait_s == 0:
            admitted.append(now_s)
        else:
            assert 0 < wait_s <= 1 / rate + 1e-9
    for first in range(len(admitted)):
        for last in range(first, len(admitted)):
            assert last - first + 1 <= burst + rate * (admitted[last] - admitted[first]) + 1e-6


def test_a_changed_key_file_takes_effect_and_a_broken_one_does_not(tmp_path, caplog):
    path, clock = tmp_path / "keys.yaml", Clock()
    security = write_keys(path, entry(ALICE), entry(BOB, limits={"concurrent_requests": 1}))
    store = KeyStore(security, {}, clock)
    bob = store.authenticate(bearer(BOB))
    bob.enter(clock())

    write_keys(path, entry(BOB, limits={"concurrent_requests": 2}), entry(EVE))
    assert store.authenticate(bearer(ALICE)).name == "alice", "not looked at on every request"
    clock.now_s += FILE_CHECK_INTERVAL_S
    with pytest.raises(RequestError):
        store.authenticate(bearer(ALICE))
    assert store.authenticate(bearer(EVE)).name == "eve"
    again = store.authenticate(bearer(BOB))
    again.enter(clock())
    with pytest.raises(RequestError):
        again.enter(clock())
    bob.leave()
    again.enter(clock())

    path.write_text(f"keys: [{{name: eve, sha256: {EVE}}}]")
    clock.now_s += FILE_CHECK_INTERVAL_S
    assert store.authenticate(bearer(EVE)).name == "eve", "the last good keys stay"
    assert "stay in force" in caplog.text
    assert EVE not in caplog.text


@pytest.mark.parametrize(
    ("security", "environ", "message"),
    [
        (ENV_KEYS, {}, "KEYS is unset or empty"),
        (ENV_KEYS, {"KEYS": " , "}, "KEYS is unset or empty"),
        (ENV_KEYS, {"KEYS": f"{ALICE},short"}, "shorter than"),
        (SecurityConfig(api_keys_file="/nowhere/keys.yaml"), {}, "No such file"),
    ],
)
def test_keys_that_are_asked_for_but_missing_stop_the_start(security, environ, message):
    with pytest.raises(ConfigError, match=message):
        KeyStore(security, environ, Clock())


def test_one_key_under_two_names_is_refused(tmp_path):
    security = write_keys(tmp_path / "keys.yaml", entry(ALICE), {**entry(ALICE), "name": "other"})
    with pytest.raises(ConfigError, match="listed twice"):
        KeyStore(security, {}, Clock())


def test_a_key_is_held_to_its_models(tmp_path):
    security = write_keys(tmp_path / "keys.yaml", entry(ALICE, models=["small"]), entry(BOB))
    store = KeyStore(security, {}, Clock())
    check_request(SimpleNamespace(model="small"), store.authenticate(bearer(ALICE)), security)
    check_request(SimpleNamespace(model="large"), store.authenticate(bearer(BOB)), security)
    with pytest.raises(RequestError) as refused:
        check_request(SimpleNamespace(model="large"), store.authenticate(bearer(ALICE)), security)
    assert (refused.value.status, refused.value.param) == (403, "model")


BOUNDS = SecurityConfig(max_n=2, max_prompts=2, max_stop_sequences=2, max_token_rules=2, max_output_tokens=10)


@pytest.mark.parametrize(
    ("field", "within", "beyond"),
    [
        ("n", 2, 3),
        ("best_of", 2, 3),
        ("stop", ["a", "b"], ["a", "b", "c"]),
        ("stop", "one long stop string", None),
        ("logit_bias", {"1": 1, "2": 2}, {"1": 1, "2": 2, "3": 3}),
        ("bad_words", ["a", "b"], ["a", "b", "c"]),
        ("stop_token_ids", [1, 2], [1, 2, 3]),
        ("max_tokens", 10, 11),
        ("max_completion_tokens", 10, 11),
        ("prompt", ["a", "b"], ["a", "b", "c"]),
        ("prompt", [[1, 2, 3], [4]], [[1], [2], [3]]),
        ("prompt", [1, 2, 3, 4], None),
        ("prompt", "a long text", None),
    ],
)
def test_bounds_of_a_request(field, within, beyond):
    somebody = KeyStore(SecurityConfig(), {}, Clock()).authenticate(None)
    check_request(SimpleNamespace(**{"max_tokens": 1, field: within}), somebody, BOUNDS)
    if beyond is not None:
        with pytest.raises(RequestError) as refused:
            check_request(SimpleNamespace(**{"max_tokens": 1, field: beyond}), somebody, BOUNDS)
        assert (refused.value.status, refused.value.param) == (400, field)


def test_a_chat_that_names_no_limit_is_left_to_the_engines_bound():
    """vLLM refuses a prompt that leaves no room for all of a limit that the request names."""
    somebody = KeyStore(SecurityConfig(), {}, Clock()).authenticate(None)
    silent = SimpleNamespace(max_tokens=None, max_completion_tokens=None)
    check_request(silent, somebody, BOUNDS)
    assert vars(silent) == {"max_tokens": None, "max_completion_tokens": None}
    explicit = SimpleNamespace(max_tokens=None, max_completion_tokens=3)
    check_request(explicit, somebody, BOUNDS)
    assert vars(explicit) == {"max_tokens": None, "max_completion_tokens": 3}


def test_config_show_prints_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEYS", ALICE)
    monkeypatch.setenv("DSPARK_SECRET", BOB)
    keys = write_keys(tmp_path / "keys.yaml", entry(EVE)).api_keys_file
    app = {
        "import_path": "dspark_ray.serving.app:build_app",
        "args": {
            "models": [{"id": "m", "target": {"source": "demo:smollm2"}}],
            "security": {"api_keys_env": "MY_KEYS", "api_keys_file": keys},
        },
    }
    (tmp_path / "app.yaml").write_text(yaml.safe_dump({"applications": [app]}))
    shown = click.testing.CliRunner().invoke(main, ["config", "show", str(tmp_path / "app.yaml")])
    assert shown.exit_code == 0, shown.output
    assert "MY_KEYS" in shown.output
    assert not any(secret in shown.output for secret in (ALICE, BOB, EVE, entry(EVE)["sha256"]))
