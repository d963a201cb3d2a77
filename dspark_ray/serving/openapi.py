"""GET /openapi.json: what this application accepts and answers, as an OpenAPI 3.1 document.

vLLM's request schemas, less what a client may not set, with the bounds that the engine and this deployment's
`SecurityConfig` put on fields, and only the models that the asking key may use.
"""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema
from ray.llm._internal.serve.core.configs.openai_api_models import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
)

from dspark_ray import __version__
from dspark_ray.config import SecurityConfig
from dspark_ray.serving.request_parsing import SERVER_FIELDS

REF = "#/components/schemas/"
# Set by the server, or of engines that this project does not start.
NOT_FOR_CLIENTS = (*SERVER_FIELDS, "request_id", "prompt_embeds", "priority", "routed_experts_prompt_start")
# What vLLM checks beside its types, so that the document says it, too.
ENGINE_BOUNDS: dict[str, dict[str, Any]] = {
    "temperature": {"minimum": 0},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "min_p": {"minimum": 0, "maximum": 1},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0},
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "n": {"minimum": 1},
    "top_logprobs": {"minimum": -1},
    "logprobs": {"minimum": -1},
    "prompt_logprobs": {"minimum": -1},
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
MODEL_CARD = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
    },
}


def openapi_document(models: Sequence[str], security: SecurityConfig) -> dict[str, Any]:
    """The document for one client.

    Args:
        models: ids that the client may use.
        security: bounds of the deployment, and whether it asks for keys.
    """
    schemas = copy.deepcopy(_vllm_schemas())
    for name, prompt in (("ChatCompletionRequest", "messages"), ("CompletionRequest", "prompt")):
        _shape_request(schemas[name], prompt, models, security)
    schemas |= {"Error": ERROR, "Model": MODEL_CARD}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "dspark_ray", "version": __version__, "description": "OpenAI-compatible API."},
        "paths": {
            "/v1/chat/completions": {"post": _generation("ChatCompletion", "chat")},
            "/v1/completions": {"post": _generation("Completion", "completions")},
            "/v1/models": {"get": _operation("models", _list_of_models())},
            "/v1/models/{model}": {
                "get": _operation("model", {"$ref": REF + "Model"})
                | {
                    "parameters": [
                        {"name": "model", "in": "path", "required": True, "schema": {"enum": list(models)}}
                    ]
                }
            },
            "/health": {
                "get": _operation("health", {"type": "object", "required": ["status"]}) | {"security": []}
            },
        },
        "components": {"schemas": schemas},
    }
    if security.api_keys_env is not None or security.api_keys_file is not None:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


@cache
def _vllm_schemas() -> dict[str, Any]:
    _, document = models_json_schema(
        [
            (ChatCompletionRequest, "validation"),
            (CompletionRequest, "validation"),
            (ChatCompletionResponse, "serialization"),
            (CompletionResponse, "serialization"),
        ],
        ref_template=REF + "{model}",
    )
    schemas: dict[str, Any] = document["$defs"]
    return schemas


def _shape_request(
    schema: dict[str, Any], prompt: str, models: Sequence[str], security: SecurityConfig
) -> None:
    properties = schema["properties"]
    for name in NOT_FOR_CLIENTS:
        properties.pop(name, None)
    properties["model"] = {"type": "string", "enum": list(models)}
    schema["required"] = ["model", prompt]
    output = {} if security.max_output_tokens is None else {"maximum": security.max_output_tokens}
    bounds = {
        **ENGINE_BOUNDS,
        "n": ENGINE_BOUNDS["n"] | {"maximum": security.max_n},
        "max_tokens": ENGINE_BOUNDS["max_tokens"] | output,
        "max_completion_tokens": ENGINE_BOUNDS["max_completion_tokens"] | output,
        "stop": {"maxItems": security.max_stop_sequences},
        "logit_bias": {"maxProperties": security.max_token_rules},
        "bad_words": {"maxItems": security.max_token_rules},
        "stop_token_ids": {"maxItems": security.max_token_rules},
    }
    for name, bound in bounds.items():
        if name in properties:
            _narrow(properties[name], bound)
    if prompt == "messages":
        properties["messages"]["minItems"] = 1
        # Its other form, with an author, is of vLLM's Responses API: chat templates need a role.
        items = properties["messages"]["items"]
        items["anyOf"] = [form for form in items["anyOf"] if form["$ref"] != REF + "Message"]
    else:
        # A list of token ids is one prompt; the other lists are several.
        token, text = {"type": "integer", "minimum": 0}, {"type": "string", "minLength": 1}
        tokens = {"type": "array", "items": token, "minItems": 1}
        several = {"type": "array", "minItems": 1, "maxItems": security.max_prompts}
        properties["prompt"] = {
            "anyOf": [text, tokens, {**several, "items": text}, {**several, "items": tokens}]
        }


def _narrow(schema: dict[str, Any], bound: dict[str, Any]) -> None:
    """Bound a property, in whichever of its alternatives the bound belongs to."""
    kinds = {"minimum": {"number", "integer"}, "maxItems": {"array"}, "maxProperties": {"object"}}
    kinds |= dict.fromkeys(("maximum", "exclusiveMinimum"), kinds["minimum"])
    for alternative in schema.get("anyOf", [schema]):
        for keyword, value in bound.items():
            if alternative.get("type") in kinds[keyword]:
                alternative[keyword] = min(value, alternative.get(keyword, value))


def _generation(name: str, operation_id: str) -> dict[str, Any]:
    body = {"application/json": {"schema": {"$ref": f"{REF}{name}Request"}}}
    operation = _operation(operation_id, {"$ref": f"{REF}{name}Response"})
    operation["requestBody"] = {"required": True, "content": body}
    event = {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"type": "string", "description": "A chunk in JSON; [DONE] at the end."}},
    }
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": event}
    return operation


def _operation(operation_id: str, answer: dict[str, Any]) -> dict[str, Any]:
    error = {"content": {"application/json": {"schema": {"$ref": REF + "Error"}}}}
    retry = {"headers": {"Retry-After": {"required": True, "schema": {"type": "integer", "minimum": 1}}}}
    return {
        "operationId": operation_id,
        "responses": {
            "200": {"description": "The answer.", "content": {"application/json": {"schema": answer}}},
            "429": error | retry | {"description": "A limit of the key is reached."},
            "503": error | retry | {"description": "Overloaded, or no replica is available."},
            "4XX": error | {"description": "The request is at fault."},
            "5XX": error | {"description": "The server is at fault."},
        },
    }


def _list_of_models() -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["object", "data"],
        "properties": {
            "object": {"const": "list"},
            "data": {"type": "array", "items": {"$ref": REF + "Model"}},
        },
    }
