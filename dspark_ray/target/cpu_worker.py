"""The worker of a CPU engine: ``worker_cls="dspark_ray.target.cpu_worker.DSparkCPUWorker"``."""

import functools
import os
from typing import Any

import torch
import vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker as nixl_worker
import vllm.v1.worker.cpu_worker as vllm_cpu_worker
from vllm import envs
from vllm.utils.cpu_resource_utils import parse_id_list
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
        if self.parallel_config.distributed_executor_backend == "uni":
            _bind_this_process(envs.VLLM_CPU_OMP_THREADS_BIND)
        vllm_cpu_worker.CPUModelRunner = DSparkCPUModelRunner
        try:
            super().init_device()
        finally:
            vllm_cpu_worker.CPUModelRunner = CPUModelRunner

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Start the KV connector without two habits of NIXL that cost a CPU engine its cores.

        It moves this thread to the node's last core, where every engine would meet, and it starts a progress
        thread that spins even when there is nothing to transfer. The worker asks NIXL in every step anyway, and
        an engine whose blocks are waited for keeps stepping, so transfers progress without that thread.
        """
        cores = os.sched_getaffinity(0)
        agent_config = nixl_worker.nixl_agent_config
        if agent_config is not None:
            nixl_worker.nixl_agent_config = functools.partial(agent_config, enable_prog_thread=False)
        try:
            super().initialize_from_config(kv_cache_config)
        finally:
            nixl_worker.nixl_agent_config = agent_config
            os.sched_setaffinity(0, cores)


def _bind_this_process(cores: str) -> None:
    """Keep this thread and those it starts on the cores that vLLM would have bound a worker process to.

    Args:
        cores: as vLLM reads them, "0,2-3"; "auto" and "nobind" leave the threads where they are.
    """
    if cores in ("auto", "nobind"):
        return
    chosen = parse_id_list(cores)
    os.sched_setaffinity(0, chosen)
    torch.set_num_threads(len(chosen))
