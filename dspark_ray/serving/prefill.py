"""A prefill replica: runs prompts through the model and keeps their KV ready for a verifier."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from ray.llm._internal.serve.core.configs.llm_config import LLMConfig
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import base_prefill_kv_transfer_params
from ray.llm._internal.serve.serving_patterns.data_parallel.dp_server import DPServer
from ray.llm._internal.serve.serving_patterns.prefill_decode.pd_server import PDPrefillServer
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

from dspark_ray.config import AppConfig, ModelConfig
from dspark_ray.serving.engine import DSparkEngine
from dspark_ray.serving.engine_report import report_engine
from dspark_ray.serving.engine_watch import watch_engine
from dspark_ray.serving.live import LiveSettings, reconfigure_engine
from dspark_ray.serving.remote_prefill import (
    PrefillAccepted,
    PrefillDone,
    PrefillEvent,
    PrefillRefused,
    PrefillRequest,
    PrefillStopped,
)
from dspark_ray.serving.speculation import drafts_in_shim
from dspark_ray.serving.telemetry import device_kind, process_stats
from dspark_ray.target.handoff import HANDOFF_KEY


class PrefillServer(PDPrefillServer):
    """Ray Serve LLM's prefill server, asked by token ids instead of by an OpenAI request."""

    _default_engine_cls = DSparkEngine
    engine: DSparkEngine

    async def __init__(self, llm_config: LLMConfig, *, model: ModelConfig, config: AppConfig):
        await super().__init__(llm_config)
        self._settings = LiveSettings(config, model)
        self._feature_endpoint: str | None = None
        if drafts_in_shim(model):
            await self._ask_feature_endpoint()
        self._watch = asyncio.create_task(watch_engine(self.engine.client, config.failover.silence_s))
        self._report = report_engine(
            "prefill",
            model,
            config,
            self.engine.counters,
            self.engine.client.collective_rpc,
            has_shim=drafts_in_shim(model),
            device_kind=device_kind(model.prefill),
        )

    async def _ask_feature_endpoint(self) -> None:
        endpoints = await self.engine.client.collective_rpc("dspark_handoff_endpoint")
        self._feature_endpoint = next((endpoint for endpoint in endpoints if endpoint), None)

    async def reconfigure(self, user_config: Any) -> None:
        """Serve's call when the deployment's user_config has changed; see `dspark_ray.config.LiveConfig`."""
        if await reconfigure_engine(self._settings, self._report, user_config):
            await self._ask_feature_endpoint()

    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent]:
        """Compute the KV of one prompt.

        Yields:
            `PrefillAccepted` at once, then `PrefillDone` when the KV can be fetched, `PrefillRefused`, or after
            `stop` perhaps `PrefillStopped`.
        """
        yield PrefillAccepted()
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={
                HANDOFF_KEY: request.request_uuid,
                "kv_transfer_params": {
                    **base_prefill_kv_transfer_params(),
                    "remote_host": None,
                    "remote_port": None,
                },
            },
        )
        prompt = tokens_input(request.prompt_token_ids, cache_salt=request.cache_salt)
        outputs = self.engine.client.generate(
            prompt, params, _engine_id(request.request_uuid), priority=request.priority
        )
        try:
            async for output in outputs:
                if output.finished and output.kv_transfer_params:
                    yield PrefillDone(output.kv_transfer_params, self._feature_endpoint)
                elif output.finished:
                    yield PrefillStopped()
        except (ValueError, VLLMClientError):
            yield PrefillRefused()

    async def stop(self, request_uuid: str) -> bool:
        """Stop working on a prompt, whose `prefill` then ends; false when it is not in work here."""
        return await self.engine.client.stop_unless_done(_engine_id(request_uuid))

    async def stats(self) -> dict[str, Any]:
        """This replica's counters."""
        return {**process_stats(), **self.engine.counters.snapshot(), "workers": self._report.worker}


def _engine_id(request_uuid: str) -> str:
    return f"prefill-{request_uuid}"


class DataParallelPrefillServer(PrefillServer, DPServer):
    """A prefill replica that is one rank of a data-parallel group; Serve starts the group together."""
