"""Scenario: every kind of request through plain vLLM and through the coupled sampler with lying drafts."""

import target_adversary
from target_engine import generate, make_engine

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a small robot who",
    "def fibonacci(n):\n",
    "List three colours: red,",
    "The weather today is",
    "Q: What is 2+2?\nA:",
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
}


def variants():
    """Name -> (fields of SamplingParams, fields that travel in extra_args under speculation)."""
    greedy, warm = {"temperature": 0.0, "max_tokens": 24}, {"temperature": 1.0, "max_tokens": 24}
    cases = {
        "greedy": (greedy, {}),
        "seed": (warm | {"seed": 1}, {}),
        "seed_hot": (warm | {"seed": 2, "temperature": 1.7}, {}),
        "seed_top_k": (warm | {"seed": 3, "top_k": 20}, {}),
        "seed_top_p": (warm | {"seed": 4, "top_p": 0.9, "temperature": 0.8}, {}),
        "seed_top_k_p": (warm | {"seed": 5, "top_k": 50, "top_p": 0.8}, {}),
        "penalties_greedy": (
            greedy | {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2}, {},
        ),
        "penalties_seed": (
            warm | {"seed": 6, "frequency_penalty": 1.0, "presence_penalty": -0.5, "repetition_penalty": 1.1}, {},
        ),
        "bias_greedy": (greedy, {"logit_bias": {28: -100.0, 30: -100.0, 198: 2.5}}),
        "bias_seed": (warm | {"seed": 7}, {"logit_bias": {28: -100.0, 260: 3.0}}),
        "min_p_seed": (warm | {"seed": 8}, {"min_p": 0.1}),
        "bias_min_p_seed": (warm | {"seed": 9, "top_p": 0.95}, {"logit_bias": {30: 4.0}, "min_p": 0.02}),
        "bad_words": (greedy | {"bad_words": ["the", " the", " a", " is the"]}, {}),
        "bad_words_seed": (warm | {"seed": 10, "bad_words": [" the", ".", ","]}, {}),
        "min_tokens": (warm | {"seed": 11, "min_tokens": 15, "stop_token_ids": [28, 30, 198, 260]}, {}),
        "stop_ids": (warm | {"seed": 12, "stop_token_ids": [28, 30, 198]}, {}),
        "stop_string": (warm | {"seed": 13, "stop": [" and", ". ", "\n"]}, {}),
        "stop_string_kept": (greedy | {"stop": ["is", "\n"], "include_stop_str_in_output": True}, {}),
        "ignore_eos": (warm | {"seed": 14, "ignore_eos": True}, {}),
        "allowed": (warm | {"seed": 15, "allowed_token_ids": list(range(200, 900))}, {}),
        "logprobs_greedy": (greedy | {"logprobs": 3}, {}),
        "logprobs_seed": (warm | {"seed": 16, "logprobs": 2, "stop": [" of"]}, {}),
        "json_greedy": (greedy | {"json": True, "max_tokens": 40}, {}),
        "json_seed": (warm | {"json": True, "seed": 17, "max_tokens": 40}, {}),
        "n3": (warm | {"seed": 18, "n": 3}, {}),
    }  # fmt: skip
    for length in range(1, 10):
        cases[f"max_tokens_{length}"] = (warm | {"seed": 20 + length, "max_tokens": length}, {})
    return cases


def _params(fields, carried, twin, speculative):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    fields, extra = dict(fields), {"twin": twin}
    if fields.pop("json", False):
        fields["structured_outputs"] = StructuredOutputsParams(json=SCHEMA)
    if not speculative:
        fields |= carried
    else:
        if "logit_bias" in carried:
            extra["dspark_logit_bias"] = [x for pair in carried["logit_bias"].items() for x in pair]
        if "min_p" in carried:
            extra["dspark_min_p"] = carried["min_p"]
    return SamplingParams(**fields, extra_args=extra)


def _record(output):
    """What the client would see of one request."""
    return [
        {
            "ids": list(one.token_ids), "text": one.text, "finish": one.finish_reason, "stop": one.stop_reason,
            "logprobs": None if one.logprobs is None else [
                sorted((token, round(entry.logprob, 4), entry.rank) for token, entry in position.items())
                for position in one.logprobs
            ],
        }
        for one in output.outputs
    ]  # fmt: skip


def compare(rounds: int = 2, prompts: int = 3) -> dict:
    """Run all variants; returns what differed, and how much was drafted and accepted."""
    cases = [(name, prompt) for name in variants() for prompt in PROMPTS[:prompts]]
    table = variants()

    def requests(speculative):
        return [p for _, p in cases], [
            _params(*table[name], twin, speculative) for twin, (name, _) in enumerate(cases)
        ]

    plain = make_engine()
    reference = [_record(output) for output in generate(plain, *requests(False))]
    del plain
    engine = make_engine(
        worker_cls="target_adversary.AdversarialWorker",
        scheduler_cls="dspark_ray.target.scheduler.DSparkScheduler",
        speculative_config={
            "method": "custom_class", "model": "target_adversary.Proposer", "num_speculative_tokens": 5,
        },
    )  # fmt: skip
    target_adversary.ORACLE |= {
        twin: record[0]["ids"] for twin, record in enumerate(reference) if len(record) == 1
    }
    differing = []
    for _ in range(rounds):
        for case, expected, output in zip(cases, reference, generate(engine, *requests(True)), strict=True):
            if (got := _record(output)) != expected:
                differing.append({"case": case, "expected": expected, "got": got})
    alone = [3, 8, 13]  # a seeded request decodes alone as it does in a batch
    for index in alone:
        prompts, params = requests(True)
        output = generate(engine, [prompts[index]], [params[index]])[0]
        if _record(output) != reference[index]:
            differing.append({"case": [*cases[index], "alone"]})
    differing += continued(engine, cases, reference)
    metrics = {m.name: getattr(m, "value", None) for m in engine.get_metrics()}
    return {
        "differing": differing,
        "requests": len(cases) * rounds + len(alone),
        "drafted": metrics["vllm:spec_decode_num_draft_tokens"],
        "accepted": metrics["vllm:spec_decode_num_accepted_tokens"],
    }


CONTINUED = (
    "greedy",
    "seed",
    "seed_hot",
    "seed_top_k_p",
    "bias_min_p_seed",
    "stop_ids",
    "ignore_eos",
    "logprobs_seed",
)


def continued(engine, cases, reference) -> list[dict]:
    """Answers that another engine began, each cut at several tokens and gone on with, that end otherwise."""
    from dspark_ray.target.seeding import DRAWS_KEY

    table, prompts, params, expected = variants(), [], [], []
    for (name, _), record, ids in zip(cases, reference, prompt_ids(engine, cases), strict=True):
        if name not in CONTINUED:
            continue
        answer = record[0]["ids"]
        for cut in {1, len(answer) // 2, len(answer) - 1} - {0, len(answer)}:
            twin = len(cases) + len(prompts)
            target_adversary.ORACLE[twin] = answer[cut:]
            one = _params(*table[name], twin, True)
            one.max_tokens -= cut
            one.extra_args[DRAWS_KEY] = cut
            prompts.append({"prompt_token_ids": [*ids, *answer[:cut]]})
            params.append(one)
            expected.append({"case": [name, cut], "ids": answer[cut:]})
    outputs = generate(engine, prompts, params)
    got = [list(output.outputs[0].token_ids) for output in outputs]
    return [want | {"got": ids} for want, ids in zip(expected, got, strict=True) if want["ids"] != ids]


def prompt_ids(engine, cases) -> list[list[int]]:
    tokenizer = engine.get_tokenizer()
    return [tokenizer(prompt)["input_ids"] for _, prompt in cases]


def seeded_chunks(worker: str) -> dict:
    """A seeded request whose prompt takes several steps, against the same in one step."""
    from vllm import SamplingParams

    extra = {
        "plain": {},
        "ours": {"worker_cls": "dspark_ray.target.cpu_worker.DSparkCPUWorker"},
        "adversary": {
            "worker_cls": "target_adversary.AdversarialWorker",
            "speculative_config": {
                "method": "custom_class", "model": "target_adversary.Proposer", "num_speculative_tokens": 4,
            },
        },
    }[worker]  # fmt: skip
    params = [
        SamplingParams(temperature=1.0, seed=5 + i, max_tokens=12, extra_args={"twin": i}) for i in range(3)
    ]
    texts = [" ".join(PROMPTS[i:] + PROMPTS[:i]) for i in range(3)]
    engine = make_engine(max_num_batched_tokens=24, **extra)
    chunked = [list(o.outputs[0].token_ids) for o in generate(engine, texts, params)]
    if worker != "ours":
        return {"chunked": chunked}
    engine = make_engine()
    return {
        "chunked": chunked,
        "whole": [list(o.outputs[0].token_ids) for o in generate(engine, texts, params)],
    }


def unseeded(samples: int = 4000, seed: int = 7) -> dict:
    """Token counts at positions 2 to 4 of unseeded answers, without and with drafts that are the likeliest text."""
    from collections import Counter

    from vllm import SamplingParams

    prompt = "Once upon a time there was a"
    settings = {"max_num_seqs": 64, "max_model_len": 64, "max_num_batched_tokens": 1024}
    counts = {}
    for name in ("plain", "speculative"):
        extra = {"seed": seed} if name == "plain" else {
            "seed": seed + 1,
            "worker_cls": "target_adversary.LikelyWorker",
            "speculative_config": {
                "method": "custom_class", "model": "target_adversary.Proposer", "num_speculative_tokens": 3,
            },
        }  # fmt: skip
        engine = make_engine(**settings, **extra)
        if name == "plain":
            likely = generate(engine, [prompt], [SamplingParams(temperature=0.0, max_tokens=4)])[0]
            target_adversary.ORACLE[0] = list(likely.outputs[0].token_ids)
        params = SamplingParams(
            temperature=0.8, top_k=40, max_tokens=4, ignore_eos=True, extra_args={"twin": 0}
        )
        outputs = generate(engine, [prompt] * samples, [params] * samples)
        rows = [list(output.outputs[0].token_ids) for output in outputs]
        counts[name] = [dict(Counter(row[k] for row in rows)) for k in (1, 2, 3)]
        metrics = {m.name: getattr(m, "value", None) for m in engine.get_metrics()}
        del engine
    accepted = metrics["vllm:spec_decode_num_accepted_tokens"]
    return {"counts": counts, "accepted": accepted}
