"""What the application answers, through the official client."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI
from serving_harness import RunningApp

PREFILL, VERIFIER = "Prefill:smollm2", "Verifier:smollm2"
QUESTION = [
    {"role": "user", "content": "Name three fruits that grow in France and say one thing about each."}
]


@pytest.fixture(scope="module")
def client(app: RunningApp) -> OpenAI:
    return app.client()


def greedy(client: OpenAI, model: str, prompt: str, **options) -> str:
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": prompt}], temperature=0, **options
    )
    return answer.choices[0].message.content


def test_text_is_that_of_vllm_alone_and_the_prompt_ran_on_the_prefill_replica(
    app: RunningApp, client: OpenAI, prompts: list[str], offline_texts: list[str]
) -> None:
    prefill, verifier = app.stats(PREFILL), app.stats(VERIFIER)
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda prompt: greedy(client, "smollm2", prompt, max_tokens=64), prompts))
    assert texts == offline_texts
    prefill_after, verifier_after = app.stats(PREFILL), app.stats(VERIFIER)
    received = verifier_after["prompt_tokens_received"] - verifier["prompt_tokens_received"]
    computed = prefill_after["prompt_tokens_computed"] - prefill["prompt_tokens_computed"]
    cached = prefill_after["prompt_tokens_cached"] - prefill["prompt_tokens_cached"]
    assert verifier_after["remote_prefills"]["done"] - verifier["remote_prefills"].get("done", 0) == len(
        prompts
    )
    assert received == computed + cached > 20 * len(prompts)
    assert verifier_after["prompt_tokens_computed"] == verifier["prompt_tokens_computed"]


def test_the_model_field_routes_and_a_model_without_prefill_says_the_same(
    app: RunningApp, client: OpenAI, prompts: list[str], offline_texts: list[str]
) -> None:
    before = app.stats("Verifier:small--local")["prompt_tokens_computed"]
    assert greedy(client, "small/local", prompts[0], max_tokens=64) == offline_texts[0]
    assert app.stats("Verifier:small--local")["prompt_tokens_computed"] > before


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2", "small/local"]
    assert client.models.retrieve("small/local").id == "small/local"


@pytest.mark.parametrize("options", [{}, {"n": 2, "seed": 5, "temperature": 1.0}], ids=["greedy", "sampled"])
def test_deltas_concatenate_to_the_whole_text(client: OpenAI, options: dict) -> None:
    request = {
        "model": "smollm2",
        "messages": [
            {"role": "user", "content": "Write the words: naïve café 日本語 🙂 Ωmega. Repeat them."}
        ],
        "max_tokens": 48,
        "temperature": 0,
    } | options
    whole = client.chat.completions.create(**request)
    texts, finish, usage = {}, {}, None
    for chunk in client.chat.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            finish[choice.index] = choice.finish_reason or finish.get(choice.index)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert finish == {choice.index: choice.finish_reason for choice in whole.choices}
    counts = [(u.prompt_tokens, u.completion_tokens, u.total_tokens) for u in (usage, whole.usage)]
    assert counts[0] == counts[1]


def test_usage_counts_what_was_emitted(client: OpenAI) -> None:
    answer = client.completions.create(
        model="smollm2",
        prompt="One, two, three,",
        max_tokens=17,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage.completion_tokens == 17
    assert answer.choices[0].finish_reason == "length"


def test_n_answers_of_one_prompt(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=QUESTION, n=3, seed=1, temperature=1.0, max_tokens=24
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3


def test_prompt_list(app: RunningApp, client: OpenAI) -> None:
    prompts = ["The capital of France is", "Two plus two is", "The sea is"]
    alone = [
        client.completions.create(model="smollm2", prompt=prompt, max_tokens=8, temperature=0).choices[0].text
        for prompt in prompts
    ]
    together = client.completions.create(model="smollm2", prompt=prompts, max_tokens=8, temperature=0)
    assert [choice.text for choice in together.choices] == alone


def test_min_tokens_and_stop(client: OpenAI) -> None:
    request = {"model": "smollm2", "prompt": "Count: 1 2 3 4 5", "max_tokens": 24, "temperature": 0}
    free = client.completions.create(**request).choices[0].text
    mark = free[10:13]
    stopped = client.completions.create(**request, stop=[mark]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (free[: free.index(mark)], "stop")
    longer = client.completions.create(**request, stop=[mark], extra_body={"min_tokens": 20})
    assert longer.usage.completion_tokens >= 20


@pytest.mark.parametrize("words", [8, 600], ids=["short", "chunked prefill"])
def test_a_seed_says_the_same_twice_alone_and_in_company(client: OpenAI, words: int) -> None:
    prompt = "sun " * words

    def sample(seed: int) -> str:
        answer = client.completions.create(
            model="smollm2", prompt=prompt, seed=seed, temperature=1.0, max_tokens=16
        )
        return answer.choices[0].text

    alone = [sample(seed) for seed in (7, 8)]
    with ThreadPoolExecutor(4) as pool:
        company = list(pool.map(sample, (7, 8, 7, 9)))
    assert company[:3] == [alone[0], alone[1], alone[0]]
    assert alone[0] != alone[1]


def test_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=0, max_tokens=6, logprobs=True, top_logprobs=2
    )
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[1].logprob <= entry.logprob < 0


def test_penalties_change_the_answer(client: OpenAI) -> None:
    request = {
        "model": "smollm2",
        "prompt": "1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1",
        "max_tokens": 16,
        "temperature": 0,
    }
    plain = client.completions.create(**request).choices[0].text
    assert plain.count("1") > 4
    penalised = client.completions.create(**request, frequency_penalty=2.0, presence_penalty=2.0)
    assert penalised.choices[0].text.count("1") < plain.count("1")


def test_json_schema(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Describe a person."}],
        temperature=0,
        max_tokens=64,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    )
    person = json.loads(answer.choices[0].message.content)
    assert set(person) == {"name", "age"}
    assert isinstance(person["age"], int)


def test_a_named_tool_is_called(client: OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Lyon"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    request = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [tool],
        "temperature": 0,
        "max_tokens": 96,
    }
    choice = {"type": "function", "function": {"name": "weather"}}
    message = client.chat.completions.create(**request, tool_choice=choice).choices[0].message
    assert message.tool_calls, message
    (call,) = message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in {"Paris", "Lyon"}
    assert client.chat.completions.create(**request).choices[0].finish_reason in {
        "stop",
        "length",
        "tool_calls",
    }


def test_the_request_id_comes_back(client: OpenAI) -> None:
    request = {"model": "smollm2", "prompt": "Hello", "max_tokens": 1}
    raw = client.completions.with_raw_response.create(**request, extra_headers={"X-Request-Id": "my-id-17"})
    assert raw.headers["x-request-id"] == "my-id-17"
    assert client.completions.with_raw_response.create(**request).headers["x-request-id"]
