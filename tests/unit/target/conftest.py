"""vLLM warns while it is imported; our own warnings stay errors."""

import warnings

import pytest


@pytest.fixture(scope="session", autouse=True)
def vllm_imported():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.v1.worker.cpu_worker
        import vllm.v1.worker.gpu_worker  # noqa: F401
