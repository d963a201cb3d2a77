"""The OpenAPI document says what is accepted: what it allows passes, and what it bounds is refused beyond."""

import json
from typing import Any

import hypothesis
import pytest
import schemathesis
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest

from dspark_ray.config import SecurityConfig
from dspark_ray.errors import RequestError
from dspark_ray.serving.access import check_request
from dspark_ray.serving.api_keys import KeyStore
from dspark_ray.serving.openapi import openapi_document
from dspark_ray.serving.request_parsing import parse_request

SECURITY = SecurityConfig(max_output_tokens=8, max_n=3)
SOMEBODY = KeyStore(SECURITY, {}, lambda: 0.0).authenticate(None)
KINDS = {"/v1/chat/completions": ChatCompletionRequest, "/v1/completions": CompletionRequest}
# Rules between fields, which a schema does not express; the answer is 400 with the reason.
BETWEEN_FIELDS = (
    "must be set", "must be provided", "can only", "cannot set both", "one kind of", "structural_tag",
    "repetition_detection", "pattern_size", "logprob_token_ids", "truncat", "thinking_token_budget",
    "json_schema", "min_tokens", "stream_interval",
)  # fmt: skip


def document(**security: Any) -> dict[str, Any]:
    return openapi_document(["m", "org/n"], SecurityConfig(**security) if security else SECURITY)


@pytest.mark.parametrize("path", KINDS)
def test_what_the_document_allows_is_accepted(path: str) -> None:
    operation = schemathesis.openapi.from_dict(document())[path]["POST"]
    outcomes: list[str | None] = []

    @hypothesis.settings(
        max_examples=40,
        database=None,
        derandomize=True,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy())
    def one(case: schemathesis.Case) -> None:
        try:
            body = parse_request(json.dumps(case.body).encode(), KINDS[path])
            check_request(body, SOMEBODY, SECURITY)
        except Exception as error:
            outcomes.append(f"{error} {case.body}")
        else:
            outcomes.append(None)

    one()
    refused = [text for text in outcomes if text is not None]
    assert [text for text in refused if not any(rule in text.lower() for rule in BETWEEN_FIELDS)] == []
    assert len(refused) < len(outcomes) / 2


@pytest.mark.parametrize(
    ("path", "field", "beyond"),
    [
        ("/v1/chat/completions", "max_completion_tokens", 9),
        ("/v1/chat/completions", "n", 4),
        ("/v1/completions", "max_tokens", 9),
        ("/v1/completions", "kv_transfer_params", {}),
    ],
)
def test_what_it_does_not_allow_is_refused(path: str, field: str, beyond: Any) -> None:
    schema = document()["components"]["schemas"][KINDS[path].__name__]
    bound = schema["properties"].get(field)
    assert bound is None or str(beyond - 1) in json.dumps(bound)
    body = {"model": "m", "prompt": "x", "messages": [{"role": "user", "content": "x"}], field: beyond}
    with pytest.raises(RequestError) as refused:
        check_request(parse_request(json.dumps(body).encode(), KINDS[path]), SOMEBODY, SECURITY)
    assert refused.value.param == field


def test_only_the_asking_keys_models_and_a_scheme_only_where_keys_are_asked_for() -> None:
    plain, guarded = document(), document(api_keys_env="KEYS")
    assert plain["components"]["schemas"]["CompletionRequest"]["properties"]["model"]["enum"] == [
        "m",
        "org/n",
    ]
    assert "security" not in plain
    assert guarded["security"] == [{"key": []}]
    assert guarded["paths"]["/health"]["get"]["security"] == []
