"""The real ingress on real Serve in front of a verifier that speaks without an engine.

    python access_driver.py ARGS.json HTTP_PORT TEMP_DIR

Says "ready" as `serving_driver` does and ends, with its cluster, when stdin closes.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any


class Speaker:
    """Says "hello"; streams it for ever when max_tokens is large."""

    async def chat(self, body: Any, raw_request_info: Any) -> AsyncGenerator[Any]:
        from ray.serve.llm.openai_api_models import ChatCompletionResponse

        most = body.max_completion_tokens or body.max_tokens
        if not body.stream:
            message = {"role": "assistant", "content": f"hello, at most {most}"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            yield ChatCompletionResponse(model=body.model, choices=[choice], usage=usage)
            return
        for _ in range(most or 1):
            delta = {"index": 0, "delta": {"content": "hello "}, "finish_reason": None}
            chunk = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": body.model}
            yield f"data: {json.dumps({**chunk, 'choices': [delta]})}\n\n"
            await asyncio.sleep(0.05)
        yield "data: [DONE]\n\n"

    async def completions(self, body: Any, raw_request_info: Any) -> AsyncGenerator[Any]:
        from ray.serve.llm.openai_api_models import CompletionResponse

        choice = {"index": 0, "text": "hello", "finish_reason": "stop"}
        if body.stream:
            chunk = {"id": "1", "object": "text_completion", "created": 0, "model": body.model}
            yield f"data: {json.dumps({**chunk, 'choices': [choice]})}\n\n"
            yield "data: [DONE]\n\n"
            return
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        yield CompletionResponse(model=body.model, choices=[choice], usage=usage)


def main(args_file: str, port: int, temp_dir: str, reply: Callable[[str], None]) -> None:
    import ray
    from ray import serve

    from dspark_ray.config import parse_app_config
    from dspark_ray.serving.ingress import make_ingress

    config = parse_app_config(json.loads(Path(args_file).read_text()))
    options = {"num_replicas": 1, "max_ongoing_requests": 64, "ray_actor_options": {"num_cpus": 0}}
    ray.init(num_cpus=4, include_dashboard=False, _temp_dir=temp_dir, object_store_memory=100 * 2**20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        speaker = serve.deployment(Speaker).options(**options).bind()
        ingress = serve.deployment(make_ingress(config.security), name="Ingress").options(**options)
        serve.run(ingress.bind(config, {model.id: speaker for model in config.models}))
        reply("ready")
        sys.stdin.read()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Ray and vLLM print is for the log
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], lambda line: print(json.dumps(line), file=replies))
