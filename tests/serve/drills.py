"""What only a process inside the Ray cluster can do; run there by `RunningApp.drill`."""

import asyncio
import os
import signal
import time
from typing import Any

import ray
from ray import serve
from ray.llm._internal.serve.core.configs.openai_api_models import CompletionRequest

from dspark_ray.protocol import DrafterRoute, SpeculationSetting
from dspark_ray.serving.drafter_directory import DrafterDirectory
from dspark_ray.serving.remote_prefill import PrefillDone, PrefillRequest
from dspark_ray.serving.speculation_mode import set_speculation


def prefill_dies_before_its_kv_is_fetched(app: str, model: str) -> dict[str, Any]:
    """Have a prompt prefilled, kill the prefill replica, give the verifier the dead blocks' address."""
    prefill = serve.get_deployment_handle(f"Prefill:{model}", app)
    verifier = serve.get_deployment_handle(f"Verifier:{model}", app)
    prompt = list(range(1000, 1300))

    def answer(transfer: dict[str, Any] | None) -> str:
        request = CompletionRequest(
            model=model, prompt=prompt, max_tokens=8, temperature=0, kv_transfer_params=transfer
        )
        *_, whole = verifier.options(stream=True).completions.remote(request, None)
        return whole.choices[0].text

    answer(None)  # the two engines know each other now
    prompt[7] = 17  # and the verifier has not seen this prompt
    *_, done = prefill.options(stream=True).prefill.remote(PrefillRequest("drill", prompt))
    assert isinstance(done, PrefillDone)
    os.kill(prefill.stats.remote().result()["pid"], signal.SIGKILL)
    time.sleep(1)
    return {"stale": answer(done.transfer), "local": answer(None)}


def begin_to_delete(app: str) -> None:
    """Have Serve stop the application; its replicas drain."""
    serve.delete(app, _blocking=False)


def speculate(app: str, model: str, setting: dict[str, Any]) -> list[dict[str, Any]]:
    """Set how the verifiers of a model speculate."""
    return set_speculation(model, SpeculationSetting(**setting), app=app)


def drafters_listed(app: str, model: str) -> list[tuple[str, str, float]]:
    """What the directory of a verifier that has just started would list."""
    directory = DrafterDirectory(app, model)

    async def found() -> tuple[DrafterRoute, ...]:
        await directory.look()
        return directory.routes()

    return [(route.replica, route.endpoint, route.weight) for route in asyncio.run(found())]


def ray_address(app: str) -> str:
    """Where other drivers find this cluster."""
    return ray.get_runtime_context().gcs_address
