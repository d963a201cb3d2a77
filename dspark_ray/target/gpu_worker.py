"""The worker of a GPU engine: ``worker_cls="dspark_ray.target.gpu_worker.DSparkGPUWorker"``.

Needs vLLM's V1 model runner: set VLLM_USE_V2_MODEL_RUNNER=0 in the engine's environment.
"""

from typing import Any

import vllm.v1.worker.gpu_model_runner as vllm_gpu_model_runner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from dspark_ray.errors import ConfigError
from dspark_ray.target.contract import check_vllm_version
from dspark_ray.target.runner_mixin import DSparkRunnerMixin
from dspark_ray.target.worker_mixin import DSparkWorkerMixin


class DSparkGPUModelRunner(DSparkRunnerMixin, GPUModelRunner):
    """vLLM's V1 GPU runner with ours in front of it."""


class DSparkGPUWorker(DSparkWorkerMixin, Worker):
    """vLLM's GPU worker with our model runner."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.use_v2_model_runner:
            raise ConfigError(
                "DSparkGPUWorker extends vLLM's V1 model runner: set VLLM_USE_V2_MODEL_RUNNER=0 in verifier.env "
                "and prefill.env, or use drafter.placement native"
            )

    def init_device(self) -> None:
        """Start as vLLM does. It names its runner class in the code, so that name is ours meanwhile."""
        check_vllm_version()
        vllm_gpu_model_runner.GPUModelRunner = DSparkGPUModelRunner
        try:
            super().init_device()
        finally:
            vllm_gpu_model_runner.GPUModelRunner = GPUModelRunner
