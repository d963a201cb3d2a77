"""Requests that an application's OpenAPI document allows, and some that it does not, by Schemathesis."""

import json
from collections import Counter
from typing import Any

import hypothesis
import requests
import schemathesis
from schemathesis.specs.openapi import checks

CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
SHARES = {
    ("/v1/chat/completions", "POST"): 46,
    ("/v1/completions", "POST"): 46,
    ("/v1/models/{model}", "GET"): 6,
    ("/v1/models", "GET"): 1,
    ("/health", "GET"): 1,
}
"""Of each hundred examples."""
TOKENS = 4
PATIENCE_S = 60
"""An answer that takes longer counts as a hang."""


def short_answers(url: str, session: requests.Session) -> dict[str, Any]:
    """The served document, with answers so short that thousands of them are affordable."""
    served: dict[str, Any] = session.get(f"{url}/openapi.json", timeout=PATIENCE_S).json()
    for name in ("ChatCompletionRequest", "CompletionRequest"):
        properties = served["components"]["schemas"][name]["properties"]
        for limit in ("max_tokens", "max_completion_tokens"):
            if limit in properties:
                properties[limit] = {"type": "integer", "minimum": 1, "maximum": TOKENS}
        properties["n"] = {"type": "integer", "minimum": 1, "maximum": 2}
    return served


def cap(body: Any) -> None:
    """Bound the answer where the example does not, or does it wrongly enough to be taken for no bound."""
    if isinstance(body, dict) and not any(body.get(name) for name in ("max_tokens", "max_completion_tokens")):
        body["max_tokens"] = TOKENS


def judge(response: schemathesis.Response) -> None:
    """Nothing of ours has failed: neither by the status nor inside a stream."""
    status, text = response.status_code, response.text
    if status == 503:
        assert int(response.headers["retry-after"][0]) >= 1
        assert response.json()["error"]["code"] == "overloaded", text
        return
    assert status < 500, text
    if response.headers["content-type"][0].startswith("text/event-stream"):
        assert text.endswith("data: [DONE]\n\n"), text[-500:]
        for event in text.split("\n\n"):
            if event.startswith('data: {"error":'):
                assert json.loads(event.removeprefix("data: "))["error"]["type"] != "server_error", event


def play(url: str, hundreds: int, key: str = "none") -> Counter[int]:
    """Run the examples: no 5xx of ours, no hang, and every answer as the document says.

    Returns:
        How often each status was the answer.
    """
    statuses: Counter[int] = Counter()
    with requests.Session() as session:
        session.headers["Authorization"] = f"Bearer {key}"
        schema = schemathesis.openapi.from_dict(short_answers(url, session))
        for (path, method), share in SHARES.items():
            for mode in schemathesis.GenerationMode:
                operation = schema[path][method]
                try:
                    cases = operation.as_strategy(generation_mode=mode)
                    examples(cases, max(1, share * hundreds // 2), url, session, statuses)
                except hypothesis.errors.Unsatisfiable:
                    assert mode is schemathesis.GenerationMode.NEGATIVE, "there is no wrong GET /health"
    return statuses


def examples(cases: Any, count: int, url: str, session: requests.Session, statuses: Counter[int]) -> None:
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=cases)
    def one(case: schemathesis.Case) -> None:
        cap(case.body)
        response = case.call(base_url=url, session=session, timeout=PATIENCE_S)
        statuses[response.status_code] += 1
        judge(response)
        case.validate_response(response, checks=CHECKS)

    one()
