"""What an engine says of itself: read inside the replica, by telemetry, by the scheduler and by tests."""

import os
from dataclasses import asdict, dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

TTFT_WEIGHT = 0.2


@dataclass
class EngineCounters:
    """Gauges of the last engine step and counters since the replica's start."""

    requests_running: int = 0
    requests_waiting: int = 0
    kv_usage: float = 0.0
    """Share of the KV blocks in use, 0 to 1."""
    kv_blocks_total: int = 0
    requests_max: int = 0
    prompt_tokens_computed: int = 0
    """Prompt tokens that this engine ran through the model."""
    prompt_tokens_cached: int = 0
    """Prompt tokens found in this engine's own prefix cache."""
    prompt_tokens_received: int = 0
    """Prompt tokens whose KV another engine computed."""
    tokens_generated: int = 0
    requests_preempted: int = 0
    ttft_s: float = 0.0
    """Recent mean from a request's arrival at this replica to its first token."""

    @property
    def kv_blocks_used(self) -> int:
        """Blocks in use, of ``kv_blocks_total``."""
        return round(self.kv_usage * self.kv_blocks_total)

    def snapshot(self) -> dict[str, Any]:
        """The numbers as plain data, with the process they are of."""
        return {**asdict(self), "kv_blocks_used": self.kv_blocks_used, "pid": os.getpid()}


class EngineStats(StatLoggerBase):
    """vLLM stat logger that keeps the numbers in this process, where the replica can read them at once."""

    def __init__(self, counters: EngineCounters, vllm_config: VllmConfig, engine_index: int = 0):  # noqa: ARG002 - vLLM's signature
        self._counters = counters
        self._config = vllm_config
        counters.requests_max = vllm_config.scheduler_config.max_num_seqs

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,  # noqa: ARG002
        engine_idx: int = 0,  # noqa: ARG002
    ) -> None:
        """Take over one engine step's statistics."""
        counters = self._counters
        if scheduler_stats is not None:
            counters.requests_running = scheduler_stats.num_running_reqs
            counters.requests_waiting = (
                scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            )
            counters.kv_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            prompt = iteration_stats.prompt_token_stats
            counters.prompt_tokens_computed += prompt.computed
            counters.prompt_tokens_cached += prompt.local_cache_hit
            counters.prompt_tokens_received += prompt.external_kv_transfer
            counters.tokens_generated += iteration_stats.num_generation_tokens
            counters.requests_preempted += iteration_stats.num_preempted_reqs
            for ttft_s in iteration_stats.time_to_first_tokens_iter:
                counters.ttft_s += TTFT_WEIGHT * (ttft_s - counters.ttft_s) if counters.ttft_s else ttft_s

    def log_engine_initialized(self) -> None:
        """Blocks are only counted once the engine has profiled its memory."""
        self._counters.kv_blocks_total = self._config.cache_config.num_gpu_blocks or 0
