"""All of vLLM but its engine, twice, with the ingress's failover in between: the client reads one answer.

The engine core is a double that speaks a given text and dies after a given number of tokens; everything that
makes an OpenAI stream out of tokens is vLLM's own.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.llm._internal.serve.core.configs.openai_api_models import ChatCompletionRequest, CompletionRequest
from starlette.datastructures import State
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.entrypoints.openai.api_server import init_app_state
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.outputs import LogprobsLists

from dspark_ray.config import FailoverConfig, ModelConfig
from dspark_ray.serving.continuation import why_not_continuable
from dspark_ray.serving.engine import DisaggregatedLLM
from dspark_ray.serving.failover import Accepted, Answer
from dspark_ray.serving.openai_errors import ERROR_EVENT
from dspark_ray.serving.streams import coalesce
from dspark_ray.target.seeding import DRAWS_KEY

SPEECH = "Once upon a time, naïve café: 日本語 🙂 Ωmega. The end, and so on and on."
MODEL = ModelConfig.model_validate({"id": "m", "target": {"source": "/m"}})
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
PROMPT = {"model": "m", "prompt": "Hello there", "stream": True, "max_tokens": 60}
REQUESTS = {
    "chat": CHAT
    | {"temperature": 0, "logprobs": True, "top_logprobs": 1, "stream_options": {"include_usage": True}},
    "chat, usage all along": CHAT
    | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "return_token_ids": True},
    "completion": PROMPT | {"logprobs": 1, "seed": 3},
    "stop": PROMPT | {"stop": ["🙂 Ωm"], "min_tokens": 5, "return_token_ids": True},
    "stop kept": PROMPT | {"stop": ["mega"], "include_stop_str_in_output": True, "logprobs": 0},
    "length": PROMPT | {"max_tokens": 9},
}


class Core:
    """An engine that says SPEECH after any prompt, and may die on the way."""

    def __init__(self) -> None:
        self.speech: list[int] = []
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)
        self.begin(None, 0)

    def begin(self, dies_after: int | None, prompt_len: int) -> None:
        """Be a new engine; the prompt that is to come has so many tokens."""
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._dies_after, self._prompt_len = dies_after, prompt_len
        self.resources.engine_dead = False
        self.draws: list[int] = []

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        params, prompt = request.sampling_params, request.prompt_token_ids
        begin = len(prompt) - self._prompt_len
        self.draws.append((params.extra_args or {}).get(DRAWS_KEY, 0))
        assert prompt[self._prompt_len :] == self.speech[:begin]
        tokens = self.speech[begin:][: params.max_tokens]
        for number, token in enumerate(tokens):
            if number == self._dies_after:
                self._outputs.put_nowait(EngineDeadError())
                return
            last = number == len(tokens) - 1
            logprobs = LogprobsLists(np.array([[token, token]]), np.full((1, 2), -0.5), np.array([1]))
            wanted = logprobs if params.num_logprobs is not None else None
            reason = FinishReason.LENGTH if last else None
            output = EngineCoreOutput(request.request_id, [token], wanted, finish_reason=reason)
            self._outputs.put_nowait(EngineCoreOutputs(outputs=[output]))

    async def get_output_async(self) -> EngineCoreOutputs:
        await asyncio.sleep(0)
        outputs = await self._outputs.get()
        if isinstance(outputs, Exception):
            await asyncio.sleep(0.1)  # vLLM drops what has not been picked up when its engine dies
            self.resources.engine_dead = True
            raise outputs
        return outputs

    async def abort_requests_async(self, _: list[str]) -> None:
        while not self._outputs.empty():  # there is one request at a time
            self._outputs.get_nowait()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    def shutdown(self, **_: Any) -> None:
        pass


class Verifier:
    """vLLM's OpenAI layer and our engine client on a `Core`."""

    def __init__(self, core: Core, state: State, client: DisaggregatedLLM):
        self.core, self.client = core, client
        self._chat, self._completions = state.openai_serving_chat, state.openai_serving_completion

    async def answer(self, body: Any) -> AsyncGenerator[Any]:
        yield Accepted("weights")
        create = (
            self._chat.create_chat_completion
            if isinstance(body, ChatCompletionRequest)
            else self._completions.create_completion
        )
        stream = await create(body)
        assert isinstance(stream, AsyncGenerator), stream
        async for part in coalesce(stream, lambda: 0.0):
            if ERROR_EVENT in part:
                assert self.client.errored
                raise EngineDeadError
            yield part


@pytest.fixture(scope="module")
def made() -> Iterator[list[Verifier]]:
    """Verifiers to use again: starting one takes a second."""
    made: list[Verifier] = []
    yield made
    for one in made:
        one.client.shutdown()


@pytest.fixture
async def verifiers(demo_model: Path, made: list[Verifier], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives as many verifiers as there are deaths in a list, in a world where the prompt has `prompt_len` tokens."""
    arguments = AsyncEngineArgs(
        model=str(demo_model), served_model_name=["m"], max_model_len=256, enforce_eager=True
    )

    async def give(deaths: list[int | None], prompt_len: int) -> list[Verifier]:
        while len(made) < len(deaths):
            core = Core()
            monkeypatch.setattr(EngineCoreClient, "make_async_mp_client", lambda core=core, **_: core)
            config = arguments.create_engine_config()
            client = DisaggregatedLLM(config, executor_class=None, log_stats=False, log_requests=False)
            core.speech = client.renderer.tokenizer(SPEECH, add_special_tokens=False)["input_ids"]
            state, args = State(), argparse.Namespace(**(vars(FrontendArgs()) | vars(arguments)))
            await init_app_state(client, state, args, supported_tasks=("generate",))
            made.append(Verifier(core, state, client))
        for one, death in zip(made, deaths, strict=False):
            one.core.begin(death, prompt_len)
            if one.client.output_handler is not None:
                one.client.output_handler.cancel()
                one.client.output_handler = None
        return made[: len(deaths)]

    return give


async def read(verifiers: list[Verifier], fields: dict[str, Any]) -> dict[str, Any]:
    """What the client of an answer reads that these verifiers give, one after the other."""
    left = iter(verifiers)
    kind = ChatCompletionRequest if "messages" in fields else CompletionRequest
    body = kind.model_validate(fields | {"request_id": "fixed"})
    reason = why_not_continuable(body, MODEL)
    assert reason is None
    losses: list[str] = []
    answer = Answer(lambda body: next(left).answer(body), body, reason, FailoverConfig(), losses.append)
    said = "".join([part async for part in answer.parts()])
    assert losses == ["continued"] * (len(verifiers) - 1)
    assert said.endswith("data: [DONE]\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in said.split("\n\n")[:-2]]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    speech = [choice.get("delta", choice) for choice in choices]
    logprobs: list[Any] = []
    for each in filter(None, (choice.get("logprobs") for choice in choices)):
        names = ("tokens", "token_logprobs", "text_offset", "top_logprobs")
        logprobs += (
            each["content"] if "content" in each else zip(*(each[name] for name in names), strict=True)
        )
    return {
        "text": "".join(part.get("content") or part.get("text") or "" for part in speech),
        "roles": [part["role"] for part in speech if "role" in part],
        "ids": [token for choice in choices for token in choice.get("token_ids") or []],
        "finish": [(c["finish_reason"], c.get("stop_reason")) for c in choices if c["finish_reason"]],
        "usage": [chunk["usage"] for chunk in chunks if chunk.get("usage")][-1:],
        "prompt": [
            holder["prompt_token_ids"] for holder in (*chunks, *choices) if holder.get("prompt_token_ids")
        ],
        "logprobs": logprobs,
    }


@pytest.mark.parametrize("fields", REQUESTS.values(), ids=REQUESTS)
async def test_wherever_an_engine_dies_the_client_reads_what_one_engine_would_have_said(
    verifiers: Any, fields: dict[str, Any]
) -> None:
    prompt_len = 31 if "messages" in fields else 2
    expected = await read(await verifiers([None], prompt_len), fields)
    assert expected["text"] == SPEECH[: len(expected["text"])] != ""
    for deaths in ([1, None], [5, None], [8, None], [3, 2, None]):
        chain = await verifiers(deaths, prompt_len)
        assert await read(chain, fields) == expected, deaths
        assert [one.core.draws for one in chain] == [[sum(deaths[:number])] for number in range(len(deaths))]


async def test_a_request_that_no_message_can_carry_is_forgotten(
    verifiers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a top_k of 2**70: what stays behind keeps the engine from ever being idle."""
    (one,) = await verifiers([None], 3)

    async def overflow(_: EngineCoreRequest) -> None:
        raise OverflowError("too large")

    monkeypatch.setattr(one.core, "add_request_async", overflow)
    processor = one.client.output_processor
    processor.abort_requests(list(processor.request_states), internal=True)  # of other tests' dead engines
    for n in (1, 2):
        with pytest.raises(VLLMValidationError, match="out of range"):
            async for _ in one.client.generate(
                {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=2, n=n), f"r{n}"
            ):
                pass
        assert not processor.has_unfinished_requests()
        assert not processor.parent_requests
