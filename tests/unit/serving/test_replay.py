"""vLLM's own client side, given the tokens of another engine, says what one engine alone would have said."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists

from dspark_ray.serving.continuation import EMITTED_KEY
from dspark_ray.serving.replay import emitted_output, emitted_tokens, remaining_request
from dspark_ray.target.seeding import DRAWS_KEY

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo_model)


def engine_request(**params: Any) -> EngineCoreRequest:
    sampling = SamplingParams(max_tokens=40, output_kind=RequestOutputKind.DELTA, **params)
    return EngineCoreRequest(
        "r", list(PROMPT), None, sampling, None, 0.0, None, None, None, external_req_id="r"
    )


def engine_output(token: int, last: bool) -> EngineCoreOutput:
    logprobs = LogprobsLists(np.array([[token]]), np.array([[-float(token)]]), np.array([1]))
    return EngineCoreOutput("r", [token], logprobs, finish_reason=FinishReason.LENGTH if last else None)


def speak(
    tokenizer: Any, tokens: list[int], cut: int, **params: Any
) -> tuple[str, list[int], list[Any], Any]:
    """Text, ids, logprobs and stop reason of the deltas; the first `cut` tokens come from another engine."""
    request = engine_request(logprobs=0, **params)
    processor, queue = (
        OutputProcessor(tokenizer, log_stats=False),
        RequestOutputCollector(RequestOutputKind.DELTA, "r"),
    )
    processor.add_request(request, None, None, 0, queue)
    steps = [emitted_output(request, tokens[:cut])] if cut else []
    steps += [engine_output(token, token == tokens[-1]) for token in tokens[cut:]]
    text, ids, logprobs = "", [], []
    for step in steps:
        processor.process_outputs([step])
        output = queue.get_nowait()
        if output is None:
            continue
        (one,) = output.outputs
        text, ids = text + one.text, ids + list(one.token_ids)
        logprobs += [next(iter(entry.values())) for entry in one.logprobs]
        if one.finish_reason is not None:
            return text, ids, logprobs, one.stop_reason
    raise AssertionError("the stream has no end")


@pytest.mark.parametrize("params", [{}, {"stop": ["本語"]}, {"stop": ["🙂"], "min_tokens": 30}], ids=str)
def test_every_cut_reads_the_same(tokenizer: Any, params: dict) -> None:
    tokens = tokenizer("Naïve café: 日本語 🙂 Ωmega, and so on.", add_special_tokens=False)["input_ids"]
    assert len(set(tokens)) == len(tokens) or tokens.count(tokens[-1]) == 1
    text, ids, logprobs, stop = speak(tokenizer, tokens, 0, **params)
    assert (stop is not None) == (params == {"stop": ["本語"]})
    for cut in range(1, len(ids)):
        again = speak(tokenizer, tokens, cut, **params)
        assert (again[0], again[1], again[3]) == (text, ids, stop), cut
        assert again[2][cut:] == logprobs[cut:]
        assert len(again[2]) == len(ids)


def test_the_engine_is_asked_for_the_rest_only() -> None:
    request = engine_request(
        min_tokens=10, seed=3, extra_args={EMITTED_KEY: [11, 12, 13], "dspark_request_uuid": "u"}
    )
    emitted = emitted_tokens(request.sampling_params)
    rest = remaining_request(request, emitted)
    assert rest.prompt_token_ids == [*PROMPT, 11, 12, 13]
    params = rest.sampling_params
    assert (params.max_tokens, params.min_tokens, params.seed) == (37, 7, 3)
    assert params.extra_args == {DRAWS_KEY: 3, "dspark_request_uuid": "u"}
    assert (request.prompt_token_ids, request.sampling_params.max_tokens) == (PROMPT, 40), (
        "the client side's own"
    )
    assert emitted_tokens(SamplingParams()) == []


def test_an_answer_without_a_rest_is_refused() -> None:
    with pytest.raises(VLLMValidationError, match="complete"):
        remaining_request(engine_request(extra_args={EMITTED_KEY: [1] * 40}), [1] * 40)
