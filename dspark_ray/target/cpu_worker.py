"""The worker of a CPU engine: ``worker_cls="dspark_ray.target.cpu_worker.DSparkCPUWorker"``."""

import os
from typing import Any

import vllm.v1.worker.cpu_worker as vllm_cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from dspark_ray.target.contract import check_vllm_version
from dspark_ray.target.runner_mixin import DSparkRunnerMixin
from dspark_ray.target.worker_mixin import DSparkWorkerMixin


class DSparkCPUModelRunner(DSparkRunnerMixin, CPUModelRunner):
    """vLLM's CPU runner with ours in front of it."""


class DSparkCPUWorker(DSparkWorkerMixin, CPUWorker):
    """vLLM's CPU worker with our model runner; without a drafter it only mends seeded requests."""

    def init_device(self) -> None:
        """Start as vLLM does. It names its runner class in the code, so that name is ours meanwhile."""
        check_vllm_version()
        vllm_cpu_worker.CPUModelRunner = DSparkCPUModelRunner
        try:
            super().init_device()
        finally:
            vllm_cpu_worker.CPUModelRunner = CPUModelRunner

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Keep this thread on its cores: NixlConnector moves it to the node's last core, where every engine meets."""
        cores = os.sched_getaffinity(0)
        try:
            super().initialize_from_config(kv_cache_config)
        finally:
            os.sched_setaffinity(0, cores)
