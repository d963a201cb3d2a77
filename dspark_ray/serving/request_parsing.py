"""From the bytes of a request to a request object that is safe to send to an engine."""

import asyncio
import math
import uuid
from typing import Any

import msgspec
from ray.llm._internal.serve.core.configs.openai_api_models import ChatCompletionRequest
from ray.llm._internal.serve.core.ingress.utils import _sanitize_chat_completion_request
from starlette.requests import Request

from dspark_ray.errors import RequestError

BODY_TIMEOUT_S = 60.0
# Only servers set these: they address other replicas' memory, or steer the engine past our configuration.
SERVER_FIELDS = ("kv_transfer_params", "ec_transfer_params")
SERVER_XARGS = ("dspark_", *SERVER_FIELDS)
FLOAT_FIELDS = (
    "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "length_penalty",
)  # fmt: skip


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read a request's body, but never more than allowed, whatever its length claims to be.

    Raises:
        RequestError: 413, or 408 for a client that does not send it.
    """
    too_large = RequestError(
        f"The request body is larger than {max_bytes} bytes.", status=413, code="request_too_large"
    )
    declared = request.headers.get("content-length", "0")
    if not declared.isdigit() or int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise RequestError("The request body did not arrive in time.", status=408, code="timeout") from None
    return bytes(body)


def parse_request(raw: bytes, kind: type) -> Any:
    """Parse a body into a request that is safe to send to an engine.

    Args:
        raw: the body.
        kind: ChatCompletionRequest or CompletionRequest.

    Returns:
        The request, under an id of our own: the client's must not decide what engines call it.

    Raises:
        RequestError, msgspec.DecodeError, ValidationError: the request is at fault.
    """
    fields = msgspec.json.decode(raw)
    if not isinstance(fields, dict):
        raise RequestError("The body must be a JSON object.")
    if not isinstance(fields.get("model"), str):
        raise RequestError("You must provide a model parameter.", param="model")
    for name in SERVER_FIELDS:
        if fields.get(name) is not None:
            raise RequestError(f"{name} cannot be set by a client.", param=name)
    xargs = fields.get("vllm_xargs")
    for name in xargs if isinstance(xargs, dict) else ():
        if name.startswith(SERVER_XARGS):
            raise RequestError(f"vllm_xargs.{name} cannot be set by a client.", param="vllm_xargs")
    body = _validated({**fields, "request_id": uuid.uuid4().hex}, kind)
    for name in FLOAT_FIELDS:
        _finite(getattr(body, name, None), name)
    for value in (body.logit_bias or {}).values():
        _finite(value, "logit_bias")
    return _with_plain_messages(body) if isinstance(body, ChatCompletionRequest) else body


def _with_plain_messages(body: ChatCompletionRequest) -> ChatCompletionRequest:
    """The request with lists where pydantic left lazy iterators, whose parts are only validated now."""
    try:
        plain = _sanitize_chat_completion_request(body)
    except ValueError as error:
        raise RequestError(str(error), param="messages") from None
    for index, message in enumerate(plain.messages):
        role = message.get("role") if isinstance(message, dict) else getattr(message, "role", None)
        if not isinstance(role, str):  # one of the forms that the type allows has its role elsewhere
            raise RequestError(f"messages[{index}] needs a role.", param="messages")
    return plain


def _validated(fields: dict[str, Any], kind: type) -> Any:
    try:
        body = kind.model_validate(dict(fields))
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        # vLLM's validators look into fields whose types have not been checked yet.
        raise RequestError(f"A field has a value of the wrong type ({type(error).__name__}).") from None
    if fields.get("max_tokens") is None:
        body.model_fields_set.discard("max_tokens")  # vLLM fills a completion's default in as if it was said
    return body


def _finite(value: float | None, param: str) -> None:
    # JSON has no NaN, but a string "nan" is taken for a number.
    if value is not None and not math.isfinite(value):
        raise RequestError(f"{param} must be a finite number.", param=param)
