"""The vLLM internals that the shim relies on: one readable line for each that changes."""

import dataclasses
from types import SimpleNamespace

import pytest

from dspark_ray.target import contract


def test_every_internal_is_there_and_takes_what_ours_expect():
    assert list(contract.broken_promises()) == []
    contract.check_vllm_version()


def test_a_changed_internal_is_named_readably():
    gone = contract.Promise("vllm.v1.sample.sampler", "Sampler.vanished", ("self",), "tested")
    changed = contract.Promise("vllm.v1.sample.sampler", "Sampler.forward", ("self", "entropy"), "tested")
    lines = list(contract.broken_promises((gone, changed)))
    assert lines[0] == "vllm.v1.sample.sampler:Sampler.vanished is gone (used because: tested)"
    assert "no longer takes entropy" in lines[1]


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(contract, "VLLM_SERIES", "0.31.")
    with pytest.raises(contract.ConfigError, match=r"0\.31"):
        contract.check_vllm_version()


def test_every_field_of_the_sampling_metadata_is_spread_over_slots():
    """A field that a new version adds would silently keep one entry a request."""
    from vllm.v1.sample.metadata import SamplingMetadata

    assert {f.name for f in dataclasses.fields(SamplingMetadata)} == contract.SAMPLING_METADATA_FIELDS


def test_attributes_of_the_runner_that_are_read():
    import inspect

    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner = inspect.getsource(GPUModelRunner.__init__)
    for name in (
        "use_aux_hidden_state_outputs",
        "discard_request_mask",
        "execute_model_state",
        "num_spec_tokens",
    ):
        assert f"self.{name}" in runner, f"GPUModelRunner no longer sets {name}"
    batch = inspect.getsource(InputBatch)
    for name in (
        "generators",
        "num_computed_tokens_cpu",
        "num_tokens_no_spec",
        "token_ids_cpu",
        "logitsprocs",
    ):
        assert f"self.{name}" in batch, f"InputBatch no longer sets {name}"


def test_the_runner_name_is_ours_only_while_the_device_starts(monkeypatch: pytest.MonkeyPatch):
    import vllm.v1.worker.cpu_worker as vllm_cpu_worker

    from dspark_ray.target.cpu_worker import DSparkCPUModelRunner, DSparkCPUWorker

    built = []

    def init_device(self):
        built.append(vllm_cpu_worker.CPUModelRunner)
        raise RuntimeError("no device")

    monkeypatch.setattr(vllm_cpu_worker.CPUWorker, "init_device", init_device)
    stock = vllm_cpu_worker.CPUModelRunner
    worker = object.__new__(DSparkCPUWorker)
    worker.parallel_config = SimpleNamespace(distributed_executor_backend="mp")
    with pytest.raises(RuntimeError, match="no device"):
        worker.init_device()
    assert built == [DSparkCPUModelRunner]
    assert vllm_cpu_worker.CPUModelRunner is stock


def test_the_gpu_worker_builds_our_runner_and_refuses_the_other_generation(monkeypatch: pytest.MonkeyPatch):
    """Wiring only: it needs no GPU to see which class vLLM's own code would build."""
    import vllm.v1.worker.gpu_model_runner as vllm_runner
    import vllm.v1.worker.gpu_worker as vllm_worker

    from dspark_ray.target.gpu_worker import DSparkGPUModelRunner, DSparkGPUWorker

    built = []
    stock = vllm_runner.GPUModelRunner

    def init_device(self):
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        built.append(GPUModelRunner)

    monkeypatch.setattr(vllm_worker.Worker, "init_device", init_device)
    DSparkGPUWorker.init_device(object.__new__(DSparkGPUWorker))
    assert built == [DSparkGPUModelRunner]
    assert vllm_runner.GPUModelRunner is stock
    monkeypatch.setattr(
        vllm_worker.Worker, "__init__", lambda self, **_: setattr(self, "use_v2_model_runner", True)
    )
    with pytest.raises(contract.ConfigError, match="VLLM_USE_V2_MODEL_RUNNER"):
        DSparkGPUWorker()
