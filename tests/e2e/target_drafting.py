"""Scenarios with a real drafter: in the worker, or behind its ZeroMQ service in another process."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
from target_engine import DEMO_MODEL, generate, make_engine

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a small robot who",
    "def fibonacci(n):\n",
    "List three colours: red,",
    "The weather today is",
    "Q: What is 2+2?\nA:",
]


def random_drafter(folder: Path, seed: int = 0) -> Path:
    """A checkpoint of the right shape that has learnt nothing."""
    import torch

    from dspark_ray.drafter.checkpoint import save_drafter
    from dspark_ray.drafter.model import DraftConfig, DSparkModel

    if (folder / "model.safetensors").exists():
        return folder
    torch.manual_seed(seed)
    config = DraftConfig(
        hidden_size=576, num_hidden_layers=1, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
        intermediate_size=512, vocab_size=49152, draft_vocab_size=49152, block_size=5, mask_token_id=16,
        target_layer_ids=(4, 15, 28), num_target_layers=30, target_hidden_size=576, markov_rank=16,
        enable_confidence_head=True, sliding_window=None, max_position_embeddings=8192, rope_theta=100000.0,
    )  # fmt: skip
    save_drafter(DSparkModel(config).to(torch.bfloat16), folder)
    return folder


def chat_prompts(count: int) -> list[list[int]]:
    """Token ids of committed prompts from all evaluation sets, in the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    lines = (Path(__file__).parents[1] / "data" / "eval_slice.jsonl").read_text().splitlines()
    every = max(1, len(lines) // count)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": json.loads(line)["prompt"]}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for line in lines[::every][:count]
    ]


def make_random_drafter(folder):
    return str(random_drafter(Path(folder)))


class ServiceProcess:
    """A drafter service in a process of its own."""

    def __init__(self, checkpoint: Path, port: int = 0, **options):
        code = (
            "import sys, json, torch\n"
            "torch.set_num_threads(1)\n"
            "from pathlib import Path\n"
            "from dspark_ray.drafter.checkpoint import load_drafter\n"
            "from dspark_ray.drafter.runner import DraftRunner\n"
            "from dspark_ray.drafter.service import DrafterService\n"
            "from dspark_ray.drafter.fingerprint import fingerprint\n"
            "args = json.loads(sys.argv[1])\n"
            "path, target = Path(args['checkpoint']), Path(args['target'])\n"
            "dtype = getattr(torch, args['dtype'])\n"
            "model = load_drafter(path, target=target, dtype=dtype)\n"
            "runner = DraftRunner(model, cache_bytes=args['cache_mib'] << 20, window=256, max_batch=64,\n"
            "    device='cpu', dtype=dtype)\n"
            "service = DrafterService(runner, fingerprint=fingerprint(path, target),\n"
            "    width=model.config.hidden_size, max_batch=64, secret=args['secret'], bind=args['bind'])\n"
            "import threading\n"
            "print(service.endpoint, flush=True)\n"
            "threading.Thread(target=service.run, daemon=True).start()\n"
            "for line in sys.stdin: print(runner.slots_in_use, flush=True)\n"
        )
        arguments = {
            "checkpoint": str(checkpoint), "target": str(DEMO_MODEL), "secret": "s3cret", "cache_mib": 128,
            "dtype": "bfloat16", "bind": f"tcp://127.0.0.1:{port or '*'}",
        } | options  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.endpoint = self._process.stdout.readline().strip()
        if not self.endpoint.startswith("tcp://"):
            raise RuntimeError("the drafter service did not start")
        self.port = int(self.endpoint.rpartition(":")[2])

    def slots_in_use(self) -> int:
        print(file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def kill(self):
        self._process.kill()
        self._process.wait()


def engine_with(
    checkpoint, *, drafts=5, scheduling=None, drafters=(), placement="colocated", options=None, **kw
):
    """An engine with the shim in it."""
    from dspark_ray.target.options import TargetOptions, engine_arguments

    os.environ["DSPARK_SECRET"] = "s3cret"
    target_options = TargetOptions.model_validate(
        {
            "placement": placement, "checkpoint": str(checkpoint),
            "scheduling": scheduling or {"mode": "fixed_len"},
            "drafters": [{"replica": f"d{i}", "endpoint": e} for i, e in enumerate(drafters)],
        } | (options or {})
    )  # fmt: skip
    return make_engine(**engine_arguments(target_options, drafts), **kw)


def stats(engine) -> dict:
    return msgspec.msgpack.decode(engine.collective_rpc("dspark_stats")[0])


def greedy(max_tokens=24, **fields):
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)


def ids(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def summary(report: dict) -> dict:
    shim, client = report["shim"], report["client"]
    rounds = max(1, shim["rounds"])
    steps = max(1, shim["steps"])
    return {
        "accept_len": 1 + shim["tokens_accepted"] / rounds,
        "tokens_per_step": shim["tokens_committed"] / steps,
        "wasted": shim["tokens_wasted"] / max(1, shim["tokens_verified"]),
        "missing": shim["missing_context"],
        "misses": client["deadline_misses"],
        "bytes_per_step": client["bytes_sent"] / steps,
        "accepted_at": shim["accepted_at"],
        "ms_per_step": {
            name: round(shim[f"{name}_ms"] / steps, 3)
            for name in ("verify", "feature", "draft_wait", "schedule", "between")
        }
        | {
            "drafter": round(client["draft_ms"] / steps, 3),
            "transport": round(client["transport_ms"] / steps, 3),
        },
    }


def try_out(checkpoint=None, dtype="float32", placement="colocated", mode="fixed_len", rounds=2):
    """Greedy text with and without the drafter, and what the shim counted."""
    checkpoint = Path(checkpoint) if checkpoint else random_drafter(Path("/tmp/t5/random-drafter"))
    plain = make_engine(dtype=dtype)
    prompts = chat_prompts(8)
    generate(plain, prompts[:2], [greedy(8)] * 2)
    began = time.perf_counter()
    expected = ids(generate(plain, prompts, [greedy()] * len(prompts)))
    plain_s = time.perf_counter() - began
    del plain
    service = ServiceProcess(checkpoint) if placement == "remote" else None
    engine = engine_with(
        checkpoint, dtype=dtype, placement=placement, scheduling={"mode": mode},
        drafters=[service.endpoint] if service else (),
    )  # fmt: skip
    result = []
    for _ in range(rounds):
        began = time.perf_counter()
        got = ids(generate(engine, prompts, [greedy()] * len(prompts)))
        report = stats(engine)
        result.append(
            {
                "same": [a == b for a, b in zip(expected, got, strict=True)],
                "speedup": plain_s / (time.perf_counter() - began),
            }
            | summary(report)
        )
    result.append({"step": report["step"]})
    if service:
        service.kill()
    return result


MODES = ("fixed_len", "fixed_tau", "tau", "throughput", "tau+throughput")


def control(engine, **fields):
    from dspark_ray.protocol import TargetControl

    engine.collective_rpc("dspark_control", args=(msgspec.msgpack.encode(TargetControl(**fields)),))


def mixed_params(count, max_tokens):
    """Greedy and seeded requests by turns."""
    from vllm import SamplingParams

    return [
        greedy(max_tokens)
        if i % 2
        else SamplingParams(temperature=0.9, top_p=0.95, seed=100 + i, max_tokens=max_tokens)
        for i in range(count)
    ]


def exactness(checkpoint, prompts=16, max_tokens=32, modes=MODES, placement="remote"):
    """Every mode, batch 1 and all at once, chunked prefill, prefix hits and preemption, against plain decoding."""
    checkpoint = Path(checkpoint)
    texts = chat_prompts(prompts)
    params = mixed_params(prompts, max_tokens)
    plain = make_engine()
    expected = ids(generate(plain, texts, params))
    del plain
    service = ServiceProcess(checkpoint) if placement == "remote" else None
    engine = engine_with(
        checkpoint, placement=placement, drafters=[service.endpoint] if service else (),
        max_num_batched_tokens=96, enable_prefix_caching=True, block_size=32, options={"tau": 0.1},
        kv_cache_memory_bytes=22 << 20,
        max_model_len=448,
    )  # fmt: skip
    differing, accepted = [], {}
    for mode in modes:
        control(engine, mode=mode)
        before = stats(engine)["shim"]
        for i, (a, b) in enumerate(zip(expected, ids(generate(engine, texts, params)), strict=True)):
            if a != b:
                differing.append({"mode": mode, "prompt": i, "expected": a, "got": b})
        differing.extend(
            {"mode": mode, "prompt": i, "alone": True}
            for i in (0, 1)
            if ids(generate(engine, [texts[i]], [params[i]]))[0] != expected[i]
        )
        after = stats(engine)["shim"]
        accepted[mode] = after["tokens_accepted"] - before["tokens_accepted"]
    metrics = {m.name: getattr(m, "value", None) for m in engine.get_metrics()}
    result = {
        "differing": differing, "accepted": accepted, "preempted": metrics["vllm:num_preemptions"],
        "prefix_restored": after["prefix_restored"], "left": stats(engine)["requests"],
    }  # fmt: skip
    if service:
        service.kill()
    return result


def drafter_lost(checkpoint, max_tokens=96):
    """The only drafter dies in the middle of traffic and comes back; texts stay, acceptance returns."""
    import threading

    checkpoint = Path(checkpoint)
    texts = chat_prompts(6)
    params = [greedy(max_tokens, ignore_eos=True)] * len(texts)
    plain = make_engine()
    expected = ids(generate(plain, texts, params))
    del plain
    service = ServiceProcess(checkpoint)
    engine = engine_with(checkpoint, placement="remote", drafters=[service.endpoint])
    events = []

    def kill_and_restart():
        time.sleep(1.0)
        service.kill()
        events.append("killed")
        again = ServiceProcess(checkpoint, port=service.port)
        events.append(again)

    got = []
    saboteur = threading.Thread(target=kill_and_restart)
    got.append(ids(generate(engine, texts, params)))
    before = stats(engine)
    saboteur.start()
    while saboteur.is_alive():
        got.append(ids(generate(engine, texts, params)))
    saboteur.join()
    during = stats(engine)
    got.append(ids(generate(engine, texts, params)))
    after = stats(engine)
    events[-1].kill()

    def accept(a, b):
        rounds = b["shim"]["rounds"] - a["shim"]["rounds"]
        return 1 + (b["shim"]["tokens_accepted"] - a["shim"]["tokens_accepted"]) / max(1, rounds)

    return {
        "same": [one == expected for one in got],
        "misses": during["client"]["deadline_misses"] + during["client"]["unavailable"],
        "accept_len": {
            "before": accept({"shim": dict.fromkeys(before["shim"], 0)}, before),
            "after": accept(during, after),
        },
        "missing_context": during["shim"]["missing_context"],
        "rounds_after": after["shim"]["rounds"] - during["shim"]["rounds"],
    }


def drafter_swapped(old, new, steps=12):
    """Another checkpoint takes over in the middle of answers: worker first, pool later, as in a roll-out."""
    from dspark_ray.protocol import DrafterRoute, TargetControl

    services = {name: ServiceProcess(Path(folder)) for name, folder in (("old", old), ("new", new))}
    texts = chat_prompts(6)
    params = [greedy(120, ignore_eos=True)] * len(texts)
    plain = make_engine()
    expected = ids(generate(plain, texts, params))
    del plain
    llm = engine_with(old, placement="remote")
    engine, outputs = llm.llm_engine, {}
    for number, tokens in enumerate(texts):
        engine.add_request(str(number), {"prompt_token_ids": tokens}, params[number])

    def use(name):
        control = TargetControl(drafters=(DrafterRoute(name, services[name].endpoint, 1.0),))
        llm.collective_rpc("dspark_control", args=(msgspec.msgpack.encode(control),))

    def swap(folder):
        return llm.collective_rpc("dspark_swap", args=(str(folder),))[0]

    def phase(count):
        before = stats(llm)
        for _ in range(count):
            for output in engine.step():
                outputs[output.request_id] = list(output.outputs[0].token_ids)
        after = stats(llm)
        mismatched = after["client"]["mismatched"] - before["client"]["mismatched"]
        return {"rounds": after["shim"]["rounds"] - before["shim"]["rounds"], "mismatched": mismatched}

    result, phases = {}, {}
    use("old")
    phases["old"] = phase(steps)
    result["refused"] = swap(Path(new) / "nowhere")
    phases["refused"] = phase(2)
    result["accepted"] = swap(new)
    use("old")  # the pool still has the old one
    phases["skewed"] = phase(steps)
    use("new")
    phases["new"] = phase(steps)
    while engine.has_unfinished_requests():
        phase(1)
    for service in services.values():
        service.kill()
    same = [outputs[str(number)] == tokens for number, tokens in enumerate(expected)]
    return result | {"same": same, "phases": phases}


def storm_of_aborts(checkpoint, count=60):
    """Requests aborted at random moments leave nothing behind: blocks, contexts, drafter slots."""
    import random

    from vllm import SamplingParams

    service = ServiceProcess(Path(checkpoint))
    llm = engine_with(
        Path(checkpoint), placement="remote", drafters=[service.endpoint], max_num_batched_tokens=64
    )
    engine, dice = llm.llm_engine, random.Random(0)
    texts = chat_prompts(12)
    running, made, finished = [], 0, 0
    while made < count or engine.has_unfinished_requests():
        if made < count and dice.random() < 0.6:
            name = f"storm-{made}"
            engine.add_request(
                name, {"prompt_token_ids": texts[made % 12]}, SamplingParams(max_tokens=40, seed=made)
            )
            running.append(name)
            made += 1
        if running and dice.random() < 0.5:
            engine.abort_request([running.pop(dice.randrange(len(running)))])
        finished += sum(output.finished for output in engine.step())
    for _ in range(3):
        engine.step()
    metrics = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    deadline = time.monotonic() + 5
    slots = None
    while slots != 0 and time.monotonic() < deadline:
        slots = service.slots_in_use()
    result = {
        "contexts": stats(llm)["requests"], "kv_usage": metrics["vllm:kv_cache_usage_perc"],
        "running": metrics["vllm:num_requests_running"], "drafter_slots": slots, "finished": finished,
    }  # fmt: skip
    service.kill()
    return result


def acceptance(checkpoint, prompts=12, max_tokens=64):
    """Tokens a round, in one process by `evaluate` and in the engine under conditions that have broken others."""
    from dspark_ray.training.evaluate import collect_rounds

    checkpoint, texts = Path(checkpoint), chat_prompts(prompts)
    rounds = collect_rounds(
        DEMO_MODEL, checkpoint, texts, temperature=0.0, max_new_tokens=max_tokens, batch_size=prompts, window=256,
        dtype="float32",
    )  # fmt: skip
    service = ServiceProcess(checkpoint, dtype="float32")
    engine = engine_with(
        checkpoint, placement="remote", drafters=[service.endpoint], enable_prefix_caching=True,
        drafts=rounds.confidence_logits.shape[1], block_size=32, max_num_batched_tokens=96,
    )  # fmt: skip
    result = {"evaluate": float(rounds.emitted.mean()), "same": [], "restored": []}
    for name in ("chunked", "prefix_hits"):
        before = stats(engine)["shim"]
        outputs = ids(generate(engine, texts, [greedy(max_tokens)] * prompts))
        after = stats(engine)["shim"]
        committed, accepted, restored = (
            after[field] - before[field]
            for field in ("tokens_committed", "tokens_accepted", "prefix_restored")
        )
        result[name] = (committed - prompts) / (committed - accepted - prompts)
        result["same"].append(sum(outputs[i] == rounds.outputs[i][: len(outputs[i])] for i in range(prompts)))
        result["restored"].append(restored)
    service.kill()
    return result


def ratio(checkpoint, mended=True):
    """vLLM's own sampler on the CPU: greedy requests beside sampled ones with top-k and top-p."""
    from vllm import SamplingParams

    checkpoint, texts = Path(checkpoint), chat_prompts(6)
    params = [
        greedy(24) if i % 2 else SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=i, max_tokens=24)
        for i in range(6)
    ]
    plain = make_engine()
    expected = ids(generate(plain, texts, params))
    del plain
    if not mended:
        import dspark_ray.target.runner_mixin as mixin

        mixin.mend_cpu_expansion = lambda: None
    engine = engine_with(checkpoint, options={"exactness": "ratio"})
    got = ids(generate(engine, texts, params))
    return {"same_greedy": [a == b for a, b in zip(expected[1::2], got[1::2], strict=True)]}


def prefill_offers(checkpoint):
    """A prefill engine's hand-off against the projection of Hugging Face hidden states."""
    import torch
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    from dspark_ray.drafter.checkpoint import load_draft_config, load_projection
    from dspark_ray.drafter.fingerprint import fingerprint
    from dspark_ray.target.handoff import HandoffFetcher

    checkpoint, texts = Path(checkpoint), chat_prompts(3)
    engine = engine_with(
        checkpoint, placement="prefill", max_num_batched_tokens=48, enable_prefix_caching=True,
        options={"window_tokens": 80}, block_size=32,
    )  # fmt: skip
    (endpoint,) = engine.collective_rpc("dspark_handoff_endpoint")
    fetcher = HandoffFetcher(fingerprint=fingerprint(checkpoint, DEMO_MODEL), width=576, secret="s3cret")
    target = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    projection = load_projection(checkpoint, dtype=torch.float32)
    layers = load_draft_config(checkpoint).target_layer_ids
    errors = []
    for turn in ("cold", "cached"):
        params = [
            SamplingParams(max_tokens=1, extra_args={"dspark_handoff": f"{turn}-{i}"})
            for i in range(len(texts))
        ]
        generate(engine, texts, params)
        for i, text in enumerate(texts):
            fetcher.ask(endpoint, f"{turn}-{i}")
            deadline, found = time.monotonic() + 5, []
            while not found and time.monotonic() < deadline:
                found = fetcher.arrived()
            _, base, rows = found[0]
            with torch.inference_mode():
                hidden = target.model(torch.tensor([text]), output_hidden_states=True).hidden_states
                wanted = projection(torch.cat([hidden[layer + 1][0] for layer in layers], dim=-1))
            error = (rows.float() - wanted[base:]).abs().max() / wanted.abs().max()
            errors.append(
                {"turn": turn, "end": base + len(rows) - len(text), "rows": len(rows), "error": float(error)}
            )
    report = msgspec.msgpack.decode(engine.collective_rpc("dspark_stats")[0])
    fetcher.close()
    return {"errors": errors, "handoffs": report["handoffs"], "lengths": [len(text) for text in texts]}


def unseeded(count):
    from vllm import SamplingParams

    return [SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True) for _ in range(count)]


def tensor_parallel(checkpoint, ranks=3):
    """Three ranks, of which the first drafts; greedy and seeded text as with one rank and no speculation."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * ranks)  # read when vllm is imported
    checkpoint, texts = Path(checkpoint), chat_prompts(4)
    params = mixed_params(4, 16)
    plain = make_engine()
    expected = ids(generate(plain, texts, params))
    del plain
    engine = engine_with(checkpoint, tensor_parallel_size=ranks)
    got = ids(generate(engine, texts, params))
    reports = engine.collective_rpc("dspark_stats")
    shim = msgspec.msgpack.decode(reports[0])["shim"]
    # Each rank samples for itself: ranks that draw differently read different tokens, and say nonsense.
    said = [
        prompt + text for prompt, text in zip(texts, ids(generate(engine, texts, unseeded(4))), strict=True)
    ]
    logprobs = [
        next(iter(position.values())).logprob
        for prompt, output in zip(
            texts, generate(engine, said, [greedy(1, prompt_logprobs=0)] * 4), strict=True
        )
        for position in output.prompt_logprobs[len(prompt) :]
    ]
    engine.llm_engine.engine_core.shutdown()
    return {
        "mean_logprob": sum(logprobs) / len(logprobs),
        "same": [a == b for a, b in zip(expected, got, strict=True)], "accepted": shim["tokens_accepted"],
        "talking": [report is not None for report in reports],
    }  # fmt: skip
