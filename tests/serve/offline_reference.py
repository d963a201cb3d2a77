"""What vLLM alone answers, offline and without any of our code: python offline_reference.py MODEL MAX_TOKENS

Reads one prompt a line (JSON strings) on stdin, writes a JSON list of texts on stdout.
"""

import json
import os
import sys


def main(model: str, max_tokens: int) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    prompts = [json.loads(line) for line in sys.stdin]
    engine = LLM(
        model,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=8,
        enforce_eager=True,
        kv_cache_memory_bytes=2**28,
    )
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    outputs = engine.chat(
        conversations, SamplingParams(temperature=0.0, max_tokens=max_tokens), use_tqdm=False
    )
    print(json.dumps([output.outputs[0].text for output in outputs]), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
