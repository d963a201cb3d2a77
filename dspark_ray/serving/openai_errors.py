"""The one table from exceptions to HTTP: every error that a client sees goes through here."""

import json
import logging
from typing import Any

import msgspec
from pydantic import ValidationError
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from dspark_ray.errors import RequestError
from dspark_ray.serving.access import error_document, error_headers

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
ERROR_EVENT = 'data: {"error":'
"""How the event begins with which vLLM ends a stream that failed."""

# exception: (status, code, message for the client; None where the exception's own may be shown)
TABLE: tuple[tuple[type[BaseException], int, str | None, str | None], ...] = (
    (msgspec.DecodeError, 400, "invalid_json", None),
    (ClientDisconnect, 400, "client_disconnected", "The client closed the connection."),
    (RecursionError, 400, "invalid_json", "The body is nested too deeply."),
    (VLLMClientError, 400, None, None),
    (BackPressureError, 503, "overloaded", "All replicas of this model are busy. Try again later."),
    (DeploymentUnavailableError, 503, "model_unavailable", "No replica of this model is available now."),
    (EngineDeadError, 503, "model_unavailable", "The replica's engine has died; it is being restarted."),
    (EngineGenerateError, 500, "engine_error", "The engine could not finish this request."),
    (RayActorError, 503, "replica_died", "The replica that served this request has died."),
    (TimeoutError, 504, "timeout", "The request took too long."),
)


def as_request_error(error: BaseException) -> RequestError:
    """Say what the client is told about an error. Whatever is not in the table is a 500 without details."""
    if isinstance(error, RayTaskError):
        error = error.cause if isinstance(error.cause, BaseException) else error
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ValidationError):
        return _from_validation(error)
    if isinstance(error, HTTPException):
        code = "unknown_url" if error.status_code == 404 else None
        return RequestError(str(error.detail), status=error.status_code, code=code)
    for kind, status, code, message in TABLE:
        if isinstance(error, kind):
            retry_after_s = RETRY_AFTER_S if status == 503 else None
            return RequestError(message or str(error), status=status, code=code, retry_after_s=retry_after_s)
    logger.error("unexpected error while serving a request", exc_info=error)
    return RequestError(
        "The server had an error while serving this request.", status=500, code="internal_error"
    )


def from_engine(error: Any) -> RequestError:
    """The error that an engine answered with: an object (or dict) with message, code, type and param."""
    fields = error if isinstance(error, dict) else error.model_dump()
    status = int(fields.get("code") or 500)
    code = None
    if (
        "maximum context length" in fields["message"]
        or "longer than the maximum model length" in fields["message"]
    ):
        code = "context_length_exceeded"
    return RequestError(
        fields["message"],
        status=status if 400 <= status < 600 else 500,
        code=code,
        param=fields.get("param"),
        retry_after_s=RETRY_AFTER_S if status in {429, 503} else None,
    )


def error_response(error: BaseException) -> JSONResponse:
    """The HTTP answer to an error, while there is still a status to send."""
    shown = as_request_error(error)
    return JSONResponse(error_document(shown), status_code=shown.status, headers=error_headers(shown))


def error_events(error: BaseException) -> str:
    """The end of a stream that cannot go on: clients raise on the event, and never see a silent cut."""
    shown = as_request_error(error)
    document = error_document(shown)
    if shown.retry_after_s is not None:  # there is no header left to say it in
        document["error"]["retry_after_s"] = shown.retry_after_s
    return f"data: {json.dumps(document)}\n\ndata: [DONE]\n\n"


def _from_validation(error: ValidationError) -> RequestError:
    first = error.errors(include_input=False, include_url=False)[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    return RequestError(f"{param}: {first['msg']}" if param else first["msg"], param=param)
