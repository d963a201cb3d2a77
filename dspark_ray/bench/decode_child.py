"""The processes behind `dspark_ray.bench.decode`: an engine that decodes on demand, or a drafter service."""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from dspark_ray.bench.decode import reply
from dspark_ray.bench.prompts import load_prompts
from dspark_ray.drafter.checkpoint import load_draft_config, load_drafter
from dspark_ray.drafter.fingerprint import fingerprint
from dspark_ray.drafter.runner import DraftRunner
from dspark_ray.drafter.service import DrafterService
from dspark_ray.target.options import DrafterAddress, TargetOptions, engine_arguments

MAX_STREAMS, MAX_MODEL_LEN = 16, 1024
_NGRAM = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def serve_drafter(arguments: dict[str, Any]) -> None:
    """Bind a service and keep it until the parent goes."""
    checkpoint, target = Path(arguments["drafter"]), Path(arguments["target"])
    dtype = getattr(torch, arguments["dtype"])
    model = load_drafter(checkpoint, target=target, dtype=dtype)
    runner = DraftRunner(
        model, cache_bytes=256 << 20, window=256, max_batch=MAX_STREAMS * 4, device="cpu", dtype=dtype
    )
    service = DrafterService(
        runner,
        fingerprint=fingerprint(checkpoint, target),
        width=model.config.hidden_size,
        max_batch=MAX_STREAMS * 4,
        secret="only-for-this-benchmark",  # noqa: S106
    )
    threading.Thread(target=service.run, daemon=True).start()
    reply(service.endpoint)
    sys.stdin.read()


class Engine:
    """One engine of the comparison."""

    def __init__(self, arguments: dict[str, Any]):
        from vllm import LLM

        self._method = method = arguments["method"]
        block_size = arguments["block_size"] or load_draft_config(Path(arguments["drafter"])).num_draft_tokens
        options = TargetOptions()
        if method in ("colocated", "remote"):
            drafters = (
                (DrafterAddress(replica="d0", endpoint=arguments["endpoint"]),) if method == "remote" else ()
            )
            options = TargetOptions.model_validate(
                {
                    "placement": method,
                    "checkpoint": arguments["drafter"],
                    "scheduling": {"mode": arguments["mode"], "fixed_tau": arguments["tau"]},
                    "tau": arguments["tau"],
                    "drafters": drafters,
                }
            )
        kwargs = engine_arguments(options, block_size)
        if method == "ngram":
            kwargs["speculative_config"] = _NGRAM | {"num_speculative_tokens": block_size}
        self._llm = LLM(
            arguments["target"], dtype=arguments["dtype"], enforce_eager=True, max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_STREAMS, kv_cache_memory_bytes=512 << 20, enable_prefix_caching=False,
            disable_log_stats=False, **kwargs,
        )  # fmt: skip
        self._prompts = _prompts(arguments["dataset"], self._llm.get_tokenizer())

    def decode(self, streams: int, first: int, tokens: int) -> dict[str, Any]:
        """Decode `streams` prompts at once, greedily, and say what it took."""
        from vllm import SamplingParams

        prompts = [self._prompts[(first + i) % len(self._prompts)] for i in range(streams)]
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        before, steps = self._shim(), self._steps()
        began, cpu_began = time.perf_counter(), time.process_time()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        result: dict[str, Any] = {
            "seconds": time.perf_counter() - began,
            "cpu_seconds": time.process_time() - cpu_began,
        }
        result["ids"] = [list(output.outputs[0].token_ids) for output in outputs]
        result["tokens"] = sum(map(len, result["ids"]))
        result["steps"] = self._steps() - steps
        if before is not None:
            after = self._shim() or {}
            result["shim"] = {name: after[name] - before[name] for name in before}
        return result

    def _steps(self) -> int:
        """Engine steps so far, from vLLM's own histogram of tokens in a step."""
        return sum(
            metric.count for metric in self._llm.get_metrics() if metric.name == "vllm:iteration_tokens_total"
        )

    def _shim(self) -> dict[str, float] | None:
        payload = self._llm.collective_rpc("dspark_stats")[0]
        if payload is None:
            return None
        report = msgspec.msgpack.decode(payload)
        merged = report["shim"] | report["client"]
        return {name: value for name, value in merged.items() if isinstance(value, int | float)}


def _prompts(dataset: str, tokenizer: Any) -> list[list[int]]:
    """Token ids of the data set's prompts in the chat template, those that fit."""
    ids = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        for prompt in load_prompts(dataset)
    ]
    return [prompt for prompt in ids if len(prompt) < MAX_MODEL_LEN // 2]


def main() -> None:
    """Serve the parent's questions."""
    role, arguments = sys.argv[1], json.loads(sys.argv[2])
    if role == "drafter":
        serve_drafter(arguments)
        return
    engine = Engine(arguments)
    reply("ready")
    for line in sys.stdin:
        reply(engine.decode(**json.loads(line)))


if __name__ == "__main__":
    main()
