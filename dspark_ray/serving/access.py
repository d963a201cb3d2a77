"""Who may ask for what, and how often: the door in front of the ingress.

Two halves, so that each works with what it has: `AccessMiddleware` decides from the headers alone, before a
body is read or a replica is picked; `check_request` decides on the validated body. Neither logs what a
request says.
"""

import json
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from dspark_ray.config import SecurityConfig
from dspark_ray.errors import RequestError
from dspark_ray.serving.api_keys import KeyStore, Principal

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

PUBLIC_PATHS = frozenset({"/health"})
OUTPUT_LIMITS = ("max_completion_tokens", "max_tokens")
SCOPE_PRINCIPAL = "principal"


def check_request(body: Any, principal: Principal, security: SecurityConfig) -> None:
    """Hold a validated chat or completion request against the key's models and the deployment's bounds.

    Args:
        body: the parsed request object; fields it lacks are not checked. A completion's default length is
            brought within ``security.max_output_tokens``. A request without any limit stays so, since vLLM would
            want room for all of one that it is given: its engine ends the answer (`engine_args.engine_kwargs`).
        principal: who asks.
        security: the bounds.

    Raises:
        RequestError: 403 for a model the key may not use, 400 naming the field that is out of bounds.
    """
    # Not getattr: reading the field max_tokens of a chat request warns that it is deprecated.
    fields = vars(body)
    model_id = fields.get("model")
    if model_id is not None and not principal.may_use(model_id):
        raise RequestError(
            f"This API key may not use the model {model_id!r}.",
            status=403,
            code="model_not_allowed",
            param="model",
        )
    _at_most(fields.get("n"), security.max_n, "n")
    _at_most(fields.get("best_of"), security.max_n, "best_of")
    stop = fields.get("stop")
    _at_most(len(stop) if isinstance(stop, list) else 0, security.max_stop_sequences, "stop")
    for name in ("logit_bias", "bad_words", "stop_token_ids"):
        _at_most(len(fields.get(name) or ()), security.max_token_rules, name)
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        _at_most(len(prompt), security.max_prompts, "prompt")
    if security.max_output_tokens is not None:
        _bound_output(body, fields, security.max_output_tokens)


def _bound_output(body: Any, fields: Mapping[str, Any], bound: int) -> None:
    said = getattr(body, "model_fields_set", fields)  # a default is not what the client asked for
    named = [name for name in OUTPUT_LIMITS if fields.get(name) is not None and name in said]
    for name in named:
        _at_most(fields[name], bound, name)
    # OpenAI's default: 16 for completions, none for chats.
    if not named and (default := fields.get("max_tokens")) is not None:
        body.max_tokens = min(default, bound)


def _at_most(value: int | None, bound: int, param: str) -> None:
    if value is not None and value > bound:
        raise RequestError(
            f"{param}: {value} is more than this deployment allows ({bound}).",
            status=400,
            code="value_out_of_bounds",
            param=param,
        )


def error_document(error: RequestError) -> dict[str, Any]:
    """The error in OpenAI's shape."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def error_headers(error: RequestError) -> dict[str, str]:
    """The headers that belong to the error's status: when to come back, how to identify oneself."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        invalid = ', error="invalid_token"' if error.code == "invalid_api_key" else ""
        headers["www-authenticate"] = f'Bearer realm="dspark-ray"{invalid}'
    return headers


class AccessMiddleware:
    """ASGI middleware: the key, its rate and its concurrency, before the application sees the request.

    A request counts as under way until its response has been sent to the end or the client is gone, so a
    stream holds its slot for as long as it runs. The principal is left in ``scope["state"]`` under
    `SCOPE_PRINCIPAL` for `check_request`.

    Args:
        app: what runs for admitted requests.
        security: keys and limits.
        environ: where ``security.api_keys_env`` is looked up; this process's environment when unset, so that
            no key travels with the pickled application.
        clock: monotonic seconds.

    Raises:
        ConfigError: from `KeyStore`.
    """

    def __init__(
        self,
        app: AsgiApp,
        security: SecurityConfig,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._app = app
        self._clock = clock
        self._keys = KeyStore(security, os.environ if environ is None else environ, clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "lifespan" or scope.get("path") in PUBLIC_PATHS:
            await self._app(scope, receive, send)
            return
        authorization = dict(scope["headers"]).get(b"authorization")
        try:
            principal = self._keys.authenticate(authorization)
            principal.enter(self._clock())
        except RequestError as error:
            await _refuse(scope, send, error)
            return
        scope.setdefault("state", {})[SCOPE_PRINCIPAL] = principal
        try:
            await self._app(scope, receive, send)
        finally:
            principal.leave()


async def _refuse(scope: Scope, send: Send, error: RequestError) -> None:
    logger.info("refused %s: %d %s", scope.get("path"), error.status, error.code)
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    body = json.dumps(error_document(error)).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **error_headers(error),
    }
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
