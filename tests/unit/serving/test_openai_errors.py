"""What clients are told about errors, wherever those come from."""

import json
import pickle

import msgspec
import pytest
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError
from vllm.v1.engine.exceptions import EngineDeadError

from dspark_ray.errors import RequestError
from dspark_ray.serving.openai_errors import as_request_error, error_events, error_response, from_engine


def from_a_replica(error: Exception) -> Exception:
    """The error as a caller gets it after it has crossed processes."""
    return RayTaskError("prefill", "traceback", pickle.loads(pickle.dumps(error))).as_instanceof_cause()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BackPressureError(num_queued_requests=3, max_queued_requests=2), 503, "overloaded"),
        (RayActorError(), 503, "replica_died"),
        (from_a_replica(EngineDeadError()), 503, "model_unavailable"),
        (from_a_replica(RequestError("too many", status=429, code="slow_down")), 429, "slow_down"),
        (msgspec.DecodeError("bad"), 400, "invalid_json"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_table(error: Exception, status: int, code: str) -> None:
    response = error_response(error)
    assert response.status_code == status
    assert json.loads(response.body)["error"]["code"] == code
    assert ("retry-after" in response.headers) == (status == 503)


def test_an_unforeseen_error_tells_nothing_of_the_inside() -> None:
    shown = as_request_error(from_a_replica(ValueError("/home/secret path")))
    assert shown.status == 500
    assert "secret" not in str(shown)


def test_an_engine_error_keeps_its_status_message_and_field() -> None:
    shown = from_engine({"message": "max_tokens must be at least 1", "code": 400, "param": "max_tokens"})
    assert (shown.status, shown.param, shown.code) == (400, "max_tokens", None)
    long = from_engine({"message": "This model's maximum context length is 8 tokens.", "code": 400})
    assert long.code == "context_length_exceeded"


def test_a_stream_ends_with_an_error_event_and_its_sentinel() -> None:
    event, done, rest = error_events(RayActorError()).split("\n\n")
    error = json.loads(event.removeprefix("data: "))["error"]
    assert (error["type"], error["retry_after_s"]) == ("server_error", 1.0)
    assert (done, rest) == ("data: [DONE]", "")
