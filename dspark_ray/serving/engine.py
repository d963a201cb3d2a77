"""The vLLM engine inside a replica, on Ray Serve LLM's engine class."""

import asyncio
import functools
import os
import time
import uuid
from typing import Any

from ray.llm._internal.common.callbacks.base import CallbackBase
from ray.llm._internal.serve.core.configs.llm_config import LLMConfig
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from ray.util.placement_group import PlacementGroup
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.executor.abstract import Executor
from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

from dspark_ray.serving import prediction_usage
from dspark_ray.serving.engine_guard import guard_children
from dspark_ray.serving.engine_stats import EngineCounters, EngineStats
from dspark_ray.serving.ports import free_port_range, peer_host
from dspark_ray.serving.remote_prefill import PrefillDone, PrefillRequest, RemotePrefill
from dspark_ray.serving.replay import emitted_output, emitted_tokens, remaining_request
from dspark_ray.serving.speculation import carries_refused_parameters, carry_refused_parameters
from dspark_ray.target.handoff import HANDOFF_ENDPOINT_KEY, HANDOFF_KEY

REQUEST_UUID_KEY = "dspark_request_uuid"
OUTPUT_WAIT_S = 0.1
SIDE_CHANNEL_PORT_ENV = "VLLM_NIXL_SIDE_CHANNEL_PORT"


class DisaggregatedLLM(AsyncLLM):
    """vLLM's engine client, which has a prompt prefilled elsewhere before the engine sees the request.

    This is the one place where a request is already tokens and sampling parameters, whatever endpoint it came
    through: what is sent to the prefill replica is exactly what this engine would have prefilled, and nothing
    about its answer (n, stop, tools, grammar, min_tokens) has to survive the trip.
    """

    remote_prefill: RemotePrefill | None = None

    @functools.cached_property
    def _carries_refused_parameters(self) -> bool:
        return carries_refused_parameters(self.vllm_config)

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> RequestOutputCollector:
        """Prefill remotely where that is possible, then add the request as vLLM does."""
        if not isinstance(params, SamplingParams):
            return await super().add_request(request_id, prompt, params, *args, **kwargs)
        request_uuid = uuid.uuid4().hex
        # From here, so that vLLM's own time to first token counts the remote prefill.
        kwargs["arrival_time"] = kwargs.get("arrival_time") or time.time()
        params = params.clone()
        params.extra_args = {**(params.extra_args or {}), REQUEST_UUID_KEY: request_uuid}
        if self._carries_refused_parameters:
            carry_refused_parameters(params, self.model_config.get_vocab_size())
        prefilled = await self._prefill_elsewhere(request_uuid, prompt, params, kwargs)
        if prefilled is not None:
            params.extra_args["kv_transfer_params"] = prefilled.transfer
            if prefilled.feature_endpoint is not None:
                params.extra_args |= {
                    HANDOFF_KEY: request_uuid,
                    HANDOFF_ENDPOINT_KEY: prefilled.feature_endpoint,
                }
        # Shielded: cancelled between the engine's having the request and our having its queue, the request
        # would run on with nobody to abort it.
        adding = asyncio.ensure_future(super().add_request(request_id, prompt, params, *args, **kwargs))
        try:
            return await asyncio.shield(adding)
        except asyncio.CancelledError:
            queue = await adding
            await self.abort(queue.request_id, internal=True)
            raise
        except Exception:
            if prefilled is not None:
                await self.notify_kv_transfer_request_rejected(request_uuid, prefilled.transfer)
            raise

    async def _add_request(
        self, request: EngineCoreRequest, prompt: str | None, parent_req: Any, index: int, queue: Any
    ) -> None:
        """Register a request as vLLM does, and forget it if it does not reach the engine.

        Raises:
            VLLMValidationError: it has an integer that no message to the engine can carry.
        """
        try:
            await self._register(request, prompt, parent_req, index, queue)
        except Exception as error:
            # vLLM would keep it for ever among those that it waits for.
            names = [request.request_id] + ([] if parent_req is None else [parent_req.request_id])
            self.output_processor.abort_requests(names, internal=True)
            if isinstance(error, OverflowError):
                raise VLLMValidationError("An integer in the request is out of range.") from None
            raise

    async def _register(
        self, request: EngineCoreRequest, prompt: str | None, parent_req: Any, index: int, queue: Any
    ) -> None:
        """Add a request; one whose answer has begun elsewhere goes on from there."""
        emitted = emitted_tokens(request.sampling_params)
        states = self.output_processor.request_states
        if not emitted:
            await super()._add_request(request, prompt, parent_req, index, queue)
            if (state := states.get(request.request_id)) is not None:  # the engine has hardly begun with it
                prediction_usage.watch(state)
            return
        remaining = remaining_request(request, emitted)
        self.output_processor.add_request(request, prompt, parent_req, index, queue)
        self.output_processor.process_outputs([emitted_output(request, emitted)])
        # vLLM's own statistics begin with the first token that this engine makes.
        states[request.request_id].is_prefilling = True
        prediction_usage.watch(states[request.request_id])
        await self.engine_core.add_request_async(remaining)

    async def stop_unless_done(self, request_id: str) -> bool:
        """Abort a request, but if the engine has finished it already, let its last output come.

        vLLM's own `abort` forgets the request here first: of one that has just finished, nobody would learn where its
        KV waits to be fetched.

        Returns:
            False when no such request is known.
        """
        internal_ids = list(self.output_processor.external_req_ids.get(request_id, ()))
        if not internal_ids:
            return False
        await self.engine_core.abort_requests_async(internal_ids)
        # Any call would do: it is answered after all that the engine has said until the abort.
        await self.is_sleeping()
        await asyncio.sleep(OUTPUT_WAIT_S)
        await self.abort(request_id)
        return True

    async def _prefill_elsewhere(
        self, request_uuid: str, prompt: Any, params: SamplingParams, kwargs: dict[str, Any]
    ) -> PrefillDone | None:
        if self.remote_prefill is None or kwargs.get("lora_request") is not None:
            return None
        # Blocks are freed when the first of n siblings has fetched them, so those prefill here; so does a
        # prompt whose logprobs are asked for, since they come from running it.
        if params.n > 1 or params.prompt_logprobs is not None:
            return None
        token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        if not token_ids or prompt.get("type") != "token":
            return None
        if not 1 < len(token_ids) < self.model_config.max_model_len:
            return None
        token_ids = [*token_ids, *emitted_tokens(params)]
        request = PrefillRequest(request_uuid, token_ids, prompt.get("cache_salt"), kwargs.get("priority", 0))
        return await self.remote_prefill.run(request)


class DSparkEngine(VLLMEngine):
    """Ray Serve LLM's vLLM engine with our engine client and counters that the replica can read."""

    def __init__(self, llm_config: LLMConfig):
        self.counters = EngineCounters()
        if llm_config.engine_kwargs.get("kv_transfer_config") and SIDE_CHANNEL_PORT_ENV not in os.environ:
            os.environ[SIDE_CHANNEL_PORT_ENV] = str(free_port_range(_ports_needed(llm_config)))
        options = llm_config.engine_kwargs.get("additional_config", {}).get("dspark")
        if options is not None:  # only the node itself knows where its sockets are to listen
            options["handoff_bind"] = f"tcp://{peer_host(options['secret_env'])}:*"
        super().__init__(llm_config)

    @property
    def client(self) -> DisaggregatedLLM:
        """The engine client; there from `start` on."""
        return self._engine_client

    async def start(self) -> None:
        """Start the engine, and what ends its processes should this one be killed."""
        await super().start()
        self._guard = guard_children()

    def _start_async_llm_engine(
        self,
        vllm_engine_args: AsyncEngineArgs,
        vllm_engine_config: VllmConfig,
        placement_group: PlacementGroup,
    ) -> DisaggregatedLLM:
        parallel = vllm_engine_config.parallel_config
        parallel.placement_group = placement_group
        if current_platform.is_cpu() and parallel.world_size == 1:
            # Ray Serve LLM asks for a worker process; on a CPU the engine that waits for it spins on one of its cores.
            # Our worker binds the engine's own process instead.
            parallel.distributed_executor_backend = "uni"
        return DisaggregatedLLM(
            vllm_config=vllm_engine_config,
            executor_class=Executor.get_class(vllm_engine_config),
            log_requests=vllm_engine_args.enable_log_requests,
            log_stats=True,
            stat_loggers=[RayPrometheusStatLogger, functools.partial(EngineStats, self.counters)],
        )


class LocalModel(CallbackBase):
    """Start-up of a replica whose model is a folder: nothing to download, so no task on each node for it."""

    async def on_before_node_init(self) -> None:
        """Called by the engine before it would start those tasks."""
        self.ctx.run_init_node = False


def _ports_needed(llm_config: LLMConfig) -> int:
    kwargs = llm_config.engine_kwargs
    sizes = (kwargs.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data"))
    return functools.reduce(lambda product, size: product * size, sizes, 1)
