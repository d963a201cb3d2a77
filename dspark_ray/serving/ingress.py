"""The OpenAI-compatible front of all models.

Ray Serve LLM's protocol (its request classes, one handle per model), but not its ingress class: that answers
an unknown model in a shape of its own, a client's kv_transfer_params with 500, and back-pressure after the
first byte. The status of every answer is decided here, before the first byte.
"""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi import FastAPI
from ray.llm._internal.serve.core.configs.openai_api_models import (
    ChatCompletionRequest,
    CompletionRequest,
    ErrorResponse,
)
from ray.llm._internal.serve.core.ingress.ingress import make_fastapi_ingress
from ray.llm._internal.serve.core.protocol import RawRequestInfo
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from dspark_ray.config import AppConfig, SecurityConfig
from dspark_ray.control.metrics import INGRESS_METRICS
from dspark_ray.errors import RequestError
from dspark_ray.serving.access import SCOPE_PRINCIPAL, AccessMiddleware, check_request
from dspark_ray.serving.cluster_scheduler import ensure_cluster_scheduler, watch_cluster_scheduler
from dspark_ray.serving.continuation import why_not_continuable
from dspark_ray.serving.drain import DrainGuard, controller_probe
from dspark_ray.serving.engine_args import HEALTH_CHECK_PERIOD_S
from dspark_ray.serving.failover import Answer
from dspark_ray.serving.live import LiveSettings
from dspark_ray.serving.openai_errors import (
    ERROR_EVENT,
    RETRY_AFTER_S,
    error_events,
    error_response,
    from_engine,
)
from dspark_ray.serving.openapi import openapi_document
from dspark_ray.serving.request_parsing import parse_request, read_body
from dspark_ray.serving.telemetry import MetricSet, process_stats, report_ingress

TRACE_HEADERS = ("traceparent", "tracestate")


class OpenAiIngress:
    """Validates requests, finds their model, relays the answer.

    An answer outlives its verifier: `dspark_ray.serving.failover` asks another one.

    Args:
        config: the application's configuration.
        verifiers: handle of the verifier deployment of each model id.
    """

    def __init__(self, config: AppConfig, verifiers: Mapping[str, DeploymentHandle]):
        self._config = config
        self._verifiers = {model: handle.options(stream=True) for model, handle in verifiers.items()}
        self._settings = LiveSettings(config)
        self._created_s = int(time.time())
        self._models = {model.id: model for model in config.models}
        self._in_hand: Counter[str] = Counter()
        self._losses: Counter[tuple[str, str]] = Counter()
        self._metrics = MetricSet(INGRESS_METRICS)
        self._scheduler = ensure_cluster_scheduler(config.control, config.telemetry)
        self._reporting = report_ingress(config, self._in_hand)
        if self._scheduler is not None:
            watch = watch_cluster_scheduler(
                self._scheduler, lambda: self._settings.control, self._config.telemetry
            )
            self._reporting.append(asyncio.create_task(watch))
        self._drain = DrainGuard(
            config.ingress.graceful_shutdown_timeout_s, HEALTH_CHECK_PERIOD_S, controller_probe()
        )

    async def reconfigure(self, user_config: Any) -> None:
        """Serve's call when the deployment's user_config has changed: bounds for the cluster scheduler."""
        if self._settings.accept(user_config):
            self._scheduler = ensure_cluster_scheduler(self._settings.control, self._config.telemetry)

    async def check_health(self) -> None:
        """Called by Serve's controller."""
        self._drain.checked()

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, ChatCompletionRequest, "chat")

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, CompletionRequest, "completions")

    async def models(self, request: Request) -> Response:
        """GET /v1/models: those that the key may use."""
        principal = request.scope["state"][SCOPE_PRINCIPAL]
        cards = [self._card(model) for model in self._verifiers if principal.may_use(model)]
        return JSONResponse({"object": "list", "data": cards})

    async def model_data(self, model: str, request: Request) -> Response:
        """GET /v1/models/{id}."""
        if model not in self._verifiers or not request.scope["state"][SCOPE_PRINCIPAL].may_use(model):
            return error_response(_unknown_model(model))
        return JSONResponse(self._card(model))

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json, for the models that the key may use."""
        principal = request.scope["state"][SCOPE_PRINCIPAL]
        models = [model for model in self._verifiers if principal.may_use(model)]
        return JSONResponse(openapi_document(models, self._config.security))

    async def health(self) -> Response:
        """GET /health."""
        return JSONResponse({"status": "ok"})

    async def stats(self) -> dict[str, int]:
        """This replica's counters; no route leads here, only its Serve handle."""
        return {**process_stats(), "requests_in_hand": self._in_hand.total()}

    def _card(self, model: str) -> dict[str, Any]:
        return {"id": model, "object": "model", "created": self._created_s, "owned_by": "dspark_ray"}

    async def _answer(self, request: Request, kind: type, method: str) -> Response:
        try:
            security = self._config.security
            body = parse_request(await read_body(request, security.max_body_bytes), kind)
            if body.model not in self._verifiers:
                raise _unknown_model(body.model)
            check_request(body, request.scope["state"][SCOPE_PRINCIPAL], security)
            parts = self._parts(body, method, request.headers)
            try:
                first = await anext(parts)
                _raise_error(first)
            except BaseException:
                await parts.aclose()
                raise
            if body.stream:
                return EventStream(self._stream(first, parts), parts)
            await parts.aclose()
            return JSONResponse(first.model_dump(mode="json"))
        except Exception as error:
            return error_response(error)

    async def _parts(self, body: Any, method: str, headers: Mapping[str, str]) -> AsyncGenerator[Any]:
        """What the verifier yields: one response object, or strings of whole events. Closing cancels it."""
        if self._in_hand.total() >= self._config.ingress.max_ongoing_requests:
            raise RequestError(
                "Too many requests are under way. Try again later.",
                status=503,
                code="overloaded",
                retry_after_s=RETRY_AFTER_S,
            )
        trace = {name: headers[name] for name in TRACE_HEADERS if name in headers}
        answer = Answer(
            lambda request: self._ask(request, method, trace),
            body,
            why_not_continuable(body, self._models[body.model]),
            self._config.failover,
            note=lambda outcome: self._count_loss(body.model, outcome),
        )
        self._in_hand[body.model] += 1
        try:
            async with contextlib.aclosing(answer.parts()) as parts:
                async for part in parts:
                    yield part
        finally:
            self._in_hand[body.model] -= 1

    async def _ask(self, body: Any, method: str, trace: dict[str, str]) -> AsyncGenerator[Any]:
        """One verifier's answer. Closing cancels it."""
        response = getattr(self._verifiers[body.model], method).remote(body, RawRequestInfo(headers=trace))
        try:
            async for part in response:
                yield part
        finally:
            response.cancel()

    def _count_loss(self, model: str, outcome: str) -> None:
        self._losses[model, outcome] += 1
        tags = {"model": model, "outcome": outcome}
        self._metrics.set("dspark_verifier_losses", self._losses[model, outcome], tags)

    async def _stream(self, first: Any, parts: AsyncGenerator[Any]) -> AsyncGenerator[str]:
        """The events for the client. Whatever happens after the first one becomes an event, too."""
        async with contextlib.aclosing(parts):
            part = first
            try:
                while part is not None:
                    if not isinstance(part, str):
                        _raise_error(part)
                    yield part
                    part = await self._next_part(parts)
            except Exception as error:
                yield error_events(error)

    async def _next_part(self, parts: AsyncGenerator[Any]) -> Any:
        """The next part; None at the end.

        Raises:
            RequestError: this replica is about to be stopped.
        """

        async def step() -> Any:
            return await anext(parts, None)

        task = asyncio.ensure_future(step())
        try:
            while True:
                remaining_s = self._drain.remaining_s()
                if remaining_s is not None and remaining_s <= 0:
                    if not await self._drain.is_drain():
                        continue
                    raise RequestError("The server is shutting down.", status=503, code="shutting_down")
                done, _ = await asyncio.wait({task}, timeout=remaining_s)
                if done:
                    return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})


class EventStream(StreamingResponse):
    """A stream that is closed, and with it all that works for it, as soon as nobody reads it any more."""

    def __init__(self, events: AsyncGenerator[str], parts: AsyncGenerator[Any]):
        super().__init__(events, media_type="text/event-stream")
        self._events = events
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            await self._parts.aclose()  # which the events only do once they have begun


def _unknown_model(model: str) -> RequestError:
    return RequestError(
        f"The model {model!r} does not exist.", status=404, code="model_not_found", param="model"
    )


def _raise_error(part: Any) -> None:
    """Raise what a part says, when it says that the engine failed."""
    if isinstance(part, ErrorResponse):
        raise from_engine(part.error)
    if isinstance(part, str) and part.startswith(ERROR_EVENT):
        event, _, _ = part.removeprefix("data: ").partition("\n\n")
        raise from_engine(json.loads(event)["error"])


def make_ingress(security: SecurityConfig) -> type:
    """The class of the ingress deployment: `OpenAiIngress` with its routes and the door in front of them."""
    app = FastAPI(title="dspark_ray", openapi_url=None)
    app.add_middleware(AccessMiddleware, security=security)

    async def on_http_error(_: Request, error: Exception) -> Response:
        return error_response(error)

    app.add_exception_handler(HTTPException, on_http_error)
    routes = {
        "chat": lambda app: app.post("/v1/chat/completions"),
        "completions": lambda app: app.post("/v1/completions"),
        "models": lambda app: app.get("/v1/models"),
        "model_data": lambda app: app.get("/v1/models/{model:path}"),
        "openapi": lambda app: app.get("/openapi.json"),
        "health": lambda app: app.get("/health"),
    }
    return make_fastapi_ingress(OpenAiIngress, endpoint_map=routes, app=app)
