"""What vLLM alone answers, offline and without any of our code: python offline_reference.py MODEL DTYPE

Reads one JSON object a line on stdin: a ``prompt``, and SamplingParams by name. Writes a JSON list on stdout:
``text``, ``token_ids`` and ``top``, the logprobs by token id of each position where they were asked for.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from dspark_ray.hardware import openmp_env


def main(model: str, dtype: str) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    requests = [json.loads(line) for line in sys.stdin]
    engine = LLM(
        model,
        dtype=dtype,
        max_model_len=1024,
        max_num_seqs=8,
        enforce_eager=True,
        kv_cache_memory_bytes=2**28,
    )
    conversations = [[{"role": "user", "content": request.pop("prompt")}] for request in requests]
    outputs = engine.chat(conversations, [SamplingParams(**r) for r in requests], use_tqdm=False)
    print(json.dumps([_plain(output.outputs[0]) for output in outputs]), file=out, flush=True)


def _plain(output: Any) -> dict[str, Any]:
    top = [{token: entry.logprob for token, entry in one.items()} for one in output.logprobs or ()]
    return {"text": output.text, "token_ids": list(output.token_ids), "top": top}


def answers(model: Path, dtype: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run all this in a process of its own.

    Raises:
        RuntimeError: with the end of what it said.
    """
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its worker ends with it, whatever ends it
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **openmp_env(),
    }
    done = subprocess.run(
        [sys.executable, __file__, str(model), dtype],
        input="\n".join(map(json.dumps, requests)),
        capture_output=True, text=True, env=env, timeout=1800, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-3000:])
    result: list[dict[str, Any]] = json.loads(done.stdout)
    return result


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
