"""Whatever a client sends is either a request or the client's fault: never a 5xx of ours, never a crash."""

import json
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest

from dspark_ray.config import SecurityConfig
from dspark_ray.serving.access import check_request, error_document
from dspark_ray.serving.api_keys import KeyStore
from dspark_ray.serving.ingress import parse_request
from dspark_ray.serving.openai_errors import as_request_error

SECURITY = SecurityConfig(max_output_tokens=1000)
SOMEBODY = KeyStore(SECURITY, {}, lambda: 0.0).authenticate(None)
MESSAGES = [{"role": "user", "content": "Hello"}]
VALID = {
    ChatCompletionRequest: {"model": "m", "messages": MESSAGES},
    CompletionRequest: {"model": "m", "prompt": "Hello"},
}
EXTREMES = st.sampled_from(
    [
        -1,
        0,
        1,
        10**30,
        -(10**30),
        1e308,
        "nan",
        "inf",
        "-1",
        "",
        "0",
        " ",
        "\x00",
        "\ud800",
        [],
        {},
        [[]],
        [None],
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | EXTREMES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "1", "name"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


def bodies(kind: type) -> st.SearchStrategy[dict]:
    """A valid request with some fields, real or invented, set to anything that JSON can say."""
    names = st.sampled_from(sorted(kind.model_fields)) | st.text(string.ascii_lowercase, max_size=6)
    return st.dictionaries(names, JSON, max_size=4).map(lambda odd: VALID[kind] | odd)


def judge(raw: bytes, kind: type) -> int:
    """The status that the ingress would decide before any engine is asked; 200 when it would ask one."""
    try:
        body = parse_request(raw, kind)
        check_request(body, SOMEBODY, SECURITY)
    except Exception as error:
        refusal = as_request_error(error)
        json.dumps(error_document(refusal))
        return refusal.status
    fields = vars(body)
    limits = [
        fields[name] for name in ("max_completion_tokens", "max_tokens") if fields.get(name) is not None
    ]
    assert max(limits, default=0) <= 1000  # without any, the engine's bound holds
    return 200


@pytest.mark.parametrize("kind", VALID, ids=lambda kind: kind.__name__)
@settings(max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_json(kind, data):
    body = data.draw(bodies(kind))
    raw = json.dumps(body).encode("utf-8", "surrogatepass")
    assert judge(raw, kind) in {200, 400}, body


@pytest.mark.parametrize("kind", VALID, ids=lambda kind: kind.__name__)
@settings(max_examples=200)
@given(raw=st.binary(max_size=64) | st.text(max_size=64).map(str.encode))
def test_any_bytes(kind, raw):
    assert judge(raw, kind) == 400


def test_plain_requests_pass():
    for kind, body in VALID.items():
        assert judge(json.dumps(body).encode(), kind) == 200


@pytest.mark.parametrize(("bound", "expected"), [(4, 4), (1000, 16)])
def test_the_default_length_of_a_completion_is_no_request_beyond_the_bound(bound, expected):
    security = SecurityConfig(max_output_tokens=bound)
    body = parse_request(json.dumps(VALID[CompletionRequest]).encode(), CompletionRequest)
    check_request(body, SOMEBODY, security)
    assert body.max_tokens == expected


@pytest.mark.parametrize("content", [[None], [1], [[]]])
def test_parts_of_a_message_that_are_none_are_the_clients_fault(content):
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    assert judge(json.dumps(body).encode(), ChatCompletionRequest) == 400


@pytest.mark.parametrize(
    "message", [{"content": "Hi"}, {"role": 3, "content": "Hi"}, {"author": {"role": "user"}, "content": []}]
)
def test_a_message_without_a_role_is_the_clients_fault(message):
    """The type allows a form of message that has none, and vLLM's templates fail on it."""
    assert judge(json.dumps({"model": "m", "messages": [message]}).encode(), ChatCompletionRequest) == 400
