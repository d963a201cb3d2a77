"""2,000 examples of the OpenAPI document on the real engine; test_access_http plays a hundred without one.

pytest --run-slow tests/serve/test_openapi.py
"""

import pytest
from openapi_examples import play
from serving_harness import RunningApp


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_examples(bounded_app: RunningApp) -> None:
    statuses = play(bounded_app.base_url, 22)
    print(statuses)
    assert statuses.total() >= 2000
    assert min(statuses[200], statuses[400]) > 100
    for model in ("smollm2", "small/local"):
        answer = bounded_app.client().completions.create(model=model, prompt="Once upon", max_tokens=3)
        assert answer.usage.completion_tokens == 3
