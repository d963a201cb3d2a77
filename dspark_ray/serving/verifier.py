"""A verifier replica: owns a request from its prompt to its last token."""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from ray import serve
from ray.llm._internal.serve.core.configs.llm_config import LLMConfig
from ray.llm._internal.serve.core.configs.openai_api_models import ChatCompletionRequest, ErrorResponse
from ray.llm._internal.serve.core.protocol import RawRequestInfo
from ray.llm._internal.serve.serving_patterns.data_parallel.dp_server import DPServer
from ray.llm._internal.serve.serving_patterns.prefill_decode.pd_server import PDDecodeServer
from ray.serve.handle import DeploymentHandle
from vllm.v1.engine.exceptions import EngineDeadError

from dspark_ray.config import AppConfig, ModelConfig
from dspark_ray.drafter.fingerprint import folder_fingerprint
from dspark_ray.protocol import SpeculationSetting
from dspark_ray.serving.drafter_directory import DrafterDirectory
from dspark_ray.serving.engine import DSparkEngine
from dspark_ray.serving.engine_report import report_engine
from dspark_ray.serving.engine_watch import watch_engine
from dspark_ray.serving.failover import HEARTBEATS_PER_SILENCE, Accepted
from dspark_ray.serving.live import LiveSettings, reconfigure_engine
from dspark_ray.serving.openai_errors import ERROR_EVENT
from dspark_ray.serving.prediction_usage import PredictionTally
from dspark_ray.serving.remote_prefill import PrefillEvent, PrefillRequest, RemotePrefill
from dspark_ray.serving.speculation import drafts_in_shim
from dspark_ray.serving.streams import coalesce, stream_interval_s, with_heartbeats
from dspark_ray.serving.telemetry import device_kind, process_stats
from dspark_ray.sources import resolve_source

STOP_TIMEOUT_S = 5.0


class VerifierServer(PDDecodeServer):
    """Ray Serve LLM's decode server; its engine client asks for the prefill (see `DisaggregatedLLM`).

    Args:
        llm_config: what starts the engine.
        model: the model served.
        config: of the application.
        prefill_server: handle of the model's prefill deployment; None where it has none.
        drafter_pool: handle of the model's drafter deployment. Draft calls do not go through it: it makes the
            pool a part of the application.
    """

    _default_engine_cls = DSparkEngine
    engine: DSparkEngine

    async def __init__(
        self,
        llm_config: LLMConfig,
        *,
        model: ModelConfig,
        config: AppConfig,
        prefill_server: DeploymentHandle | None = None,
        drafter_pool: DeploymentHandle | None = None,  # noqa: ARG002
    ):
        self._remote_prefill: RemotePrefill | None = None
        if prefill_server is None:
            # Past PDDecodeServer, which insists on a prefill deployment, to whatever server comes after it.
            await super(PDDecodeServer, self).__init__(llm_config)
        else:
            await super().__init__(llm_config, prefill_server=prefill_server)
            self._use_prefill(model)
        self._settings = LiveSettings(config, model)
        self._target = target_identity(model)
        self._heartbeat_s = config.failover.silence_s / HEARTBEATS_PER_SILENCE
        self._engine_died = asyncio.Event()
        self._watch = asyncio.create_task(
            watch_engine(self.engine.client, config.failover.silence_s, self._engine_died)
        )
        self._start_reporting(model, config)

    def _use_prefill(self, model: ModelConfig) -> None:
        client = self.engine.client
        self._remote_prefill = RemotePrefill(
            self._ask_prefill,
            client.notify_kv_transfer_request_rejected,
            self._stop_prefill,
            queue_wait_s=model.prefill.queue_wait_s,
            deadline_s=model.prefill.deadline_s,
        )
        client.remote_prefill = self._remote_prefill

    def _start_reporting(self, model: ModelConfig, config: AppConfig) -> None:
        """Report load, follow policies and, with a remote drafter, the pool."""
        speculative = self.engine.client.vllm_config.speculative_config
        drafting = speculative is not None and drafts_in_shim(model)
        remote = drafting and model.drafter.placement == "remote"
        app = serve.get_replica_context().app_name
        self._report = report_engine(
            "verifier",
            model,
            config,
            self.engine.counters,
            self.engine.client.collective_rpc,
            has_shim=drafting,
            queued=lambda: self._remote_prefill.waiting if self._remote_prefill else 0,
            device_kind=device_kind(model.verifier),
            routes=DrafterDirectory(app, model.id).routes if remote else None,
        )

    async def reconfigure(self, user_config: Any) -> None:
        """Serve's call when the deployment's user_config has changed; see `dspark_ray.config.LiveConfig`."""
        await reconfigure_engine(self._settings, self._report, user_config)

    async def _ask_prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent]:
        response = self._prefill_handle.prefill.remote(request)
        try:
            async for event in response:
                yield event
        finally:
            response.cancel()

    async def _stop_prefill(self, request_uuid: str) -> bool:
        answers = self._prefill_handle.broadcast("stop", request_uuid)
        found = await answers.results_async(timeout_s=STOP_TIMEOUT_S, return_exceptions=True)
        return any(one is True for one in found)

    async def _pd_handle_request(
        self, request: Any, raw_request_info: RawRequestInfo | None = None
    ) -> AsyncGenerator[Any]:
        """Run one chat or completion request on this replica's engine.

        Yields:
            `Accepted`, then one response object or strings of whole server-sent events; heartbeats in between.
        """
        yield Accepted(self._target)
        method = "chat" if isinstance(request, ChatCompletionRequest) else "completions"
        answer = await self._run_request(request, engine_method=method, raw_request_info=raw_request_info)
        answer = self._raise_if_engine_died(answer)
        answer = PredictionTally().filled_in(answer)
        if request.stream:
            counters = self.engine.counters
            answer = coalesce(answer, lambda: stream_interval_s(counters.requests_running))
        async with contextlib.aclosing(with_heartbeats(answer, self._heartbeat_s)) as parts:
            async for part in parts:
                yield part

    async def _raise_if_engine_died(self, answer: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
        """The parts of an answer; vLLM's own words on a dead engine become an error that the ingress knows."""
        async with contextlib.aclosing(answer):
            async for part in answer:
                failed = (
                    part.startswith(ERROR_EVENT) if isinstance(part, str) else isinstance(part, ErrorResponse)
                )
                if failed and self.engine.client.errored:
                    self._engine_died.set()
                    raise EngineDeadError
                yield part

    async def set_speculation(self, setting: SpeculationSetting) -> dict[str, Any]:
        """Follow an operator's setting; see `EngineReport.set_speculation`."""
        return await self._report.set_speculation(setting)

    async def stats(self) -> dict[str, Any]:
        """This replica's counters."""
        remote = self._remote_prefill
        return {
            **process_stats(),
            **self.engine.counters.snapshot(),
            "requests_queued": remote.waiting if remote else 0,
            "remote_prefills": dict(remote.outcomes) if remote else {},
            "workers": self._report.worker,
        }


def target_identity(model: ModelConfig) -> str:
    """Tells apart targets that would answer differently: their weights and how they are computed."""
    source = resolve_source(model.target.source, f"model {model.id}: target.source")
    weights = folder_fingerprint(Path(source)) if Path(source).is_dir() else source
    computed = json.dumps([weights, model.target.dtype, model.target.engine], sort_keys=True, default=str)
    return hashlib.blake2b(computed.encode(), digest_size=16).hexdigest()


class DataParallelVerifierServer(VerifierServer, DPServer):
    """A verifier that is one rank of a data-parallel group; Serve starts and restarts the group together."""
