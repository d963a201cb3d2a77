"""A stream that two verifiers gave reads as one: every cut, every chunking, chats and completions."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.llm._internal.serve.core.configs.openai_api_models import ChatCompletionRequest, CompletionRequest

from dspark_ray.config import ModelConfig
from dspark_ray.errors import ProtocolError
from dspark_ray.serving.continuation import EMITTED_KEY, Transcript, why_not_continuable

MODEL = {"id": "m", "target": {"source": "/m"}}
REMOTE = MODEL | {"drafter": {"placement": "remote", "source": "/d"}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
PROMPT = {"model": "m", "prompt": "Hi", "stream": True}


def events(
    kind: str, texts: list[str], sizes: list[int], created: int, *, logprobs: bool = False
) -> list[str]:
    """A whole answer as vLLM writes it: token i says texts[i]; the i-th chunk has sizes[i] tokens."""
    chunks: list[dict[str, Any]] = []
    if kind == "chat":
        chunks.append({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    begin = 0
    while begin < len(texts):
        end = begin + (sizes.pop(0) if sizes else 1)
        ids, said = list(range(begin, min(end, len(texts)))), "".join(texts[begin:end])
        choice: dict[str, Any] = {"index": 0, "token_ids": ids, "finish_reason": None}
        if end >= len(texts):
            choice["finish_reason"] = "length"
        if kind == "chat":
            choice["delta"] = {"content": said}
            choice["logprobs"] = {"content": [{"token": i} for i in ids]} if logprobs else None
        else:
            choice["text"] = said
            choice["prompt_token_ids"] = [7, 8] if begin == 0 else None
            choice["logprobs"] = {"tokens": ids, "text_offset": ids} if logprobs else None
        chunks.append({"choices": [choice]})
        begin = end
    chunks.append({"choices": [], "usage": {"completion_tokens": len(texts)}})
    chunks[0]["prompt_token_ids"] = [7, 8]
    head = {"id": f"id-{created}", "created": created}
    return [f"data: {json.dumps(head | chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]


def read(said: str) -> dict[str, Any]:
    """What a client makes of a stream."""
    assert said.endswith("data: [DONE]\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in said.split("\n\n")[:-2]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    speech = [choice.get("delta", choice) for choice in choices]
    logprobs = [choice.get("logprobs") or {} for choice in choices]
    return {
        "heads": {(chunk["id"], chunk["created"]) for chunk in chunks},
        "text": "".join(part.get("content") or part.get("text") or "" for part in speech),
        "roles": [part["role"] for part in speech if "role" in part],
        "logprobs": [token for each in logprobs for token in each.get("content", each.get("tokens", []))],
        "finish": [choice["finish_reason"] for choice in choices if choice.get("finish_reason")],
        "ids": [token for choice in choices for token in choice.get("token_ids") or []],
        "usage": [chunk["usage"] for chunk in chunks if "usage" in chunk],
    }


@given(st.data())
def test_whatever_the_cut_and_the_chunks_the_client_reads_one_answer(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["chat", "completions"]))
    texts = data.draw(st.lists(st.text("ab é\n", max_size=3), min_size=2, max_size=8))
    keep = data.draw(st.booleans())

    def answer(created: int) -> list[str]:
        sizes = data.draw(st.lists(st.integers(1, 4), max_size=8))
        return events(kind, texts, sizes, created, logprobs=True)

    whole = Transcript(keep_token_ids=keep)
    expected = read("".join(map(whole.relay, answer(1))))
    transcript, said = Transcript(keep_token_ids=keep), ""
    for created in (1, 2, 3):
        transcript.begin_again()
        repeated = answer(created)
        if created < 3:
            unfinished = [event for event in repeated[:-2] if '"length"' not in event]
            repeated = unfinished[: data.draw(st.integers(0, len(unfinished)))]
        else:
            repeated = ["".join(repeated)]  # several events in one message
        if transcript.token_ids:
            body = transcript.request(CompletionRequest(**PROMPT))
            assert body.vllm_xargs == {EMITTED_KEY: transcript.token_ids}
        said += "".join(map(transcript.relay, repeated))
    got = read(said)
    assert got.pop("heads") != set()
    expected.pop("heads")
    assert got == expected
    assert len(read(said)["heads"]) == 1
    assert got["text"] == "".join(texts)
    assert got["ids"] == (list(range(len(texts))) if keep else [])
    assert got["logprobs"] == (
        [{"token": i} for i in range(len(texts))] if kind == "chat" else list(range(len(texts)))
    )
    assert transcript.finished
    assert transcript.closed


def test_what_the_client_did_not_ask_for_it_does_not_get() -> None:
    transcript = Transcript(keep_token_ids=False)
    said = "".join(map(transcript.relay, events("completions", ["a", "b"], [], 1)))
    assert '"token_ids":[' not in said
    assert "[7,8]" not in said
    assert transcript.token_ids == [0, 1]


@pytest.mark.parametrize("other", [["a", "X", "c"], ["a"]], ids=["other text", "shorter"])
def test_a_verifier_that_repeats_something_else_is_not_believed(other: list[str]) -> None:
    transcript = Transcript(keep_token_ids=False)
    for event in events("chat", ["a", "b", "c"], [], 1)[:3]:
        transcript.relay(event)
    transcript.begin_again()
    with pytest.raises(ProtocolError):
        transcript.relay("".join(events("chat", other, [1], 2)))


CONTINUABLE = {
    "greedy": (PROMPT | {"temperature": 0}, MODEL),
    "stop, min_tokens, repetition": (
        PROMPT | {"stop": ["x"], "min_tokens": 3, "repetition_penalty": 1.2},
        MODEL,
    ),
    "logprobs": (CHAT | {"logprobs": True, "top_logprobs": 2}, MODEL),
    "bias": (PROMPT | {"logit_bias": {"5": 1.0}, "min_p": 0.1, "top_k": 4, "allowed_token_ids": [1]}, MODEL),
    "seed without a drafter": (PROMPT | {"seed": 1}, MODEL),
    "coupled seed": (PROMPT | {"seed": 1}, REMOTE),
    "tokens": (PROMPT | {"prompt": [5, 6, 7]}, MODEL),
    "one prompt": (PROMPT | {"prompt": ["a"]}, MODEL),
    "text format": (CHAT | {"response_format": {"type": "text"}}, MODEL),
    "greedy seed": (PROMPT | {"seed": 1, "temperature": 0}, REMOTE | {"exactness": "ratio"}),
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FINAL = {
    "n": (CHAT | {"n": 2}, MODEL),
    "prompts": (PROMPT | {"prompt": ["a", "b"]}, MODEL),
    "token prompts": (PROMPT | {"prompt": [[1], [2]]}, MODEL),
    "echo": (PROMPT | {"echo": True}, MODEL),
    "presence": (CHAT | {"presence_penalty": 0.5}, MODEL),
    "frequency": (CHAT | {"frequency_penalty": 0.5}, MODEL),
    "bad words": (CHAT | {"bad_words": ["no"]}, MODEL),
    "json": (CHAT | {"response_format": {"type": "json_object"}}, MODEL),
    "choice": (PROMPT | {"structured_outputs": {"choice": ["a", "b"]}}, MODEL),
    "tools": (CHAT | {"tools": [TOOL], "tool_choice": "auto"}, MODEL),
    "hidden reasoning": (CHAT | {"include_reasoning": False}, MODEL),
    "custom arguments": (CHAT | {"vllm_xargs": {"a": 1}}, MODEL),
    "ratio seed": (CHAT | {"seed": 1}, REMOTE | {"exactness": "ratio"}),
    "GPU seed": (CHAT | {"seed": 1}, MODEL | {"verifier": {"gpus": 1}}),
}


@pytest.mark.parametrize(("fields", "model"), CONTINUABLE.values(), ids=CONTINUABLE)
def test_continuable(fields: dict, model: dict) -> None:
    assert why_not_continuable(request(fields), ModelConfig.model_validate(model)) is None


@pytest.mark.parametrize(("fields", "model"), FINAL.values(), ids=FINAL)
def test_not_continuable(fields: dict, model: dict) -> None:
    assert why_not_continuable(request(fields), ModelConfig.model_validate(model))


def request(fields: dict) -> Any:
    return (ChatCompletionRequest if "messages" in fields else CompletionRequest)(**fields)
