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
    every = len(lines) // count
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": json.loads(line)["prompt"]}], add_generation_prompt=True, return_dict=False
        )
        for line in lines[::every][:count]
    ]


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
            "from dspark_ray.drafter.wire import fingerprint\n"
            "args = json.loads(sys.argv[1])\n"
            "path, target = Path(args['checkpoint']), Path(args['target'])\n"
            "model = load_drafter(path, target=target, dtype=torch.bfloat16)\n"
            "runner = DraftRunner(model, cache_bytes=args['cache_mib'] << 20, window=256, max_batch=64,\n"
            "    device='cpu', dtype=torch.bfloat16)\n"
            "service = DrafterService(runner, fingerprint=fingerprint(path, target),\n"
            "    width=model.config.hidden_size, max_batch=64, secret=args['secret'], bind=args['bind'])\n"
            "print(service.endpoint, flush=True)\n"
            "service.run()\n"
        )
        arguments = {
            "checkpoint": str(checkpoint), "target": str(DEMO_MODEL), "secret": "s3cret", "cache_mib": 128,
            "bind": f"tcp://127.0.0.1:{port or '*'}",
        } | options  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(arguments)],
            stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.endpoint = self._process.stdout.readline().strip()
        if not self.endpoint.startswith("tcp://"):
            raise RuntimeError("the drafter service did not start")
        self.port = int(self.endpoint.rpartition(":")[2])

    def kill(self):
        self._process.kill()
        self._process.wait()


def engine_with(checkpoint, *, block_size=5, scheduling=None, drafters=(), placement="colocated", options=None, **kw):
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
    return make_engine(**engine_arguments(target_options, block_size), **kw)


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
        | {"drafter": round(client["draft_ms"] / steps, 3), "transport": round(client["transport_ms"] / steps, 3)},
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
            {"same": [a == b for a, b in zip(expected, got, strict=True)], "speedup": plain_s / (time.perf_counter() - began)}
            | summary(report)
        )
    result.append({"step": report["step"]})
    if service:
        service.kill()
    return result
