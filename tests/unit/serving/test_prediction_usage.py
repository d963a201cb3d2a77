"""Drafts in the usage of an answer, whatever form it has."""

import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.llm._internal.serve.core.configs.openai_api_models import ChatCompletionResponse
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from dspark_ray.serving.prediction_usage import PredictionTally, watch


def sequence(rounds: list[tuple[int, int]] | None) -> Any:
    """The state of a sequence after rounds of (drafted, accepted); None without speculation."""
    metrics = None if rounds is None else RequestSpecDecodeMetrics.new(5)
    for drafted, accepted in rounds or ():
        metrics.observe(drafted, accepted)
    return SimpleNamespace(spec_decode_metrics=metrics)


async def answer(sequences: list[Any], *parts: Any) -> AsyncGenerator[Any]:
    """Parts of an answer, whose sequences are only through when the last one is made."""
    states = [SimpleNamespace(spec_decode_metrics=None) for _ in sequences]
    for state in states:
        watch(state)
    for number, part in enumerate(parts, start=1):
        if number == len(parts):
            for state, through in zip(states, sequences, strict=True):
                state.spec_decode_metrics = through.spec_decode_metrics
        yield part


def whole(completion_tokens: int) -> ChatCompletionResponse:
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": completion_tokens,
        "total_tokens": 3 + completion_tokens,
    }
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
    return ChatCompletionResponse(model="m", choices=[choice], usage=usage)


@pytest.mark.parametrize(
    ("sequences", "emitted", "counts"),
    [
        ([sequence([(5, 2), (5, 0), (3, 3)])], 9, (5, 8)),
        (
            [sequence([(5, 1)]), sequence([(5, 4)]), sequence([(2, 2)])],
            20,
            (7, 5),
        ),  # n of them, several prompts
        ([sequence([(5, 5)])], 3, (3, 2)),  # cut off by a stop in mid-block
        ([sequence([])], 4, (0, 0)),
    ],
)
async def test_an_answers_usage_tells_its_drafts(sequences: list[Any], emitted: int, counts: tuple[int, int]):
    (part,) = [part async for part in PredictionTally().filled_in(answer(sequences, whole(emitted)))]
    details = part.model_dump(mode="json")["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == counts
    assert details["reasoning_tokens"] == 0


async def test_a_streams_last_usage_tells_them_and_nothing_else_is_touched():
    def event(choices: list[Any]) -> str:
        body = {"id": "1", "choices": choices, "usage": {"prompt_tokens": 1, "completion_tokens": 9}}
        return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"

    text = event([{"delta": {"content": 'a "usage":{ \u2028\n 日'}}])
    parts = [text, event([]) + "data: [DONE]\n\n"]
    first, last = [p async for p in PredictionTally().filled_in(answer([sequence([(5, 2)])], *parts))]
    assert first == text
    usage = json.loads(last.removeprefix("data: ").removesuffix("\n\ndata: [DONE]\n\n"))["usage"]
    assert usage["completion_tokens_details"] == {
        "accepted_prediction_tokens": 2,
        "rejected_prediction_tokens": 3,
    }


async def test_without_speculation_nothing_is_added():
    (part,) = [part async for part in PredictionTally().filled_in(answer([sequence(None)], whole(9)))]
    assert part.usage.completion_tokens_details is None


async def test_concurrent_answers_do_not_mix():
    one = PredictionTally().filled_in(answer([sequence([(5, 1)])], whole(9)))
    watch(sequence([(5, 5)]))  # outside of any answer
    assert (await anext(one)).usage.completion_tokens_details.accepted_prediction_tokens == 1
    await one.aclose()
