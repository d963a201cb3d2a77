"""What Ray Serve LLM and vLLM are told follows from the configuration, and from it alone."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.llm import LLMConfig
from vllm import SamplingParams
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.exceptions import VLLMValidationError

from dspark_ray.config import AppConfig, ModelConfig, RoleConfig, SecurityConfig
from dspark_ray.errors import ConfigError
from dspark_ray.serving import engine_args
from dspark_ray.serving.engine_args import core_binding
from dspark_ray.serving.speculation import carries_refused_parameters, carry_refused_parameters


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return tmp_path


def model(folder: Path, **fields) -> ModelConfig:
    return ModelConfig.model_validate({"id": "m/x.1", "target": {"source": str(folder)}} | fields)


REPO = Path(__file__).resolve().parents[3]


def llm_config(config: ModelConfig, role: RoleConfig, *, disaggregated: bool) -> LLMConfig:
    return engine_args.llm_config(config, role, AppConfig(models=(config,)), disaggregated=disaggregated)


def test_cpu_roles_get_cpu_bundles_bounds_and_the_same_engine_on_both_sides(folder: Path) -> None:
    config = model(
        folder,
        prefill={"replicas": 2, "cpus": 2, "cpu_cores": "0"},
        verifier={
            "cpu_cores": "1-2,5",
            "max_ongoing_requests": 7,
            "max_queued_requests": 3,
            "env": {"A": "b"},
        },
    )
    prefill = llm_config(config, config.prefill, disaggregated=True)
    verifier = llm_config(config, config.verifier, disaggregated=True)
    assert prefill.engine_kwargs == verifier.engine_kwargs
    assert prefill.placement_group_config["bundles"] == [{"CPU": 2.0}]
    assert prefill.accelerator_config.kind == "cpu"
    transfer = prefill.engine_kwargs["kv_transfer_config"]
    assert (transfer["kv_connector"], transfer["kv_load_failure_policy"]) == ("NixlConnector", "recompute")
    assert prefill.deployment_config["num_replicas"] == 2
    assert verifier.deployment_config["max_ongoing_requests"] == 7
    assert verifier.deployment_config["max_queued_requests"] == 3
    env = verifier.runtime_env["env_vars"]
    assert (env["VLLM_CPU_OMP_THREADS_BIND"], env["A"], env["HF_HUB_OFFLINE"]) == ("1,2,5", "b", "1")


@pytest.mark.parametrize(
    ("asked", "bf16", "gpus", "told"),
    [
        ("auto", False, 0, "float32"),
        ("auto", True, 0, "auto"),
        ("bfloat16", False, 0, "bfloat16"),
        ("auto", False, 1, "auto"),
    ],
)
def test_auto_avoids_bf16_on_cpus_that_emulate_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, asked: str, bf16: bool, gpus: int, told: str
) -> None:
    monkeypatch.setattr(engine_args, "cpu_computes_bf16", lambda: bf16)
    config = model(folder, target={"source": str(folder), "dtype": asked}, verifier={"gpus": gpus})
    assert llm_config(config, config.verifier, disaggregated=False).engine_kwargs["dtype"] == told


def test_without_prefill_replicas_there_is_no_connector(folder: Path) -> None:
    config = model(folder)
    assert "kv_transfer_config" not in llm_config(config, config.verifier, disaggregated=False).engine_kwargs


def test_gpu_ranks_get_a_bundle_each_and_none_of_the_cpu_settings(folder: Path) -> None:
    config = model(
        folder,
        target={"source": str(folder), "tensor_parallel_size": 2, "engine": {"gpu_memory_utilization": 0.8}},
        verifier={"gpus": 2, "cpus": 4, "accelerator_type": "H100"},
    )
    made = llm_config(config, config.verifier, disaggregated=True)
    assert made.placement_group_config["bundles"] == [{"CPU": 2.0, "GPU": 1.0}] * 2
    assert made.engine_kwargs["kv_transfer_config"]["kv_buffer_device"] == "cuda"
    assert made.engine_kwargs["gpu_memory_utilization"] == 0.8
    assert "worker_cls" not in made.engine_kwargs
    assert "LD_PRELOAD" not in made.runtime_env["env_vars"]


@pytest.mark.parametrize(
    ("own", "told"),
    [(None, 100), ({"temperature": 0.5, "max_new_tokens": 40}, 40), ({"max_new_tokens": 900}, 100)],
)
def test_the_engines_end_every_answer_at_the_deployments_bound(
    folder: Path, own: dict[str, Any] | None, told: int
) -> None:
    """Where no limit was named, too, and then after less where the prompt leaves less room."""
    config = model(
        folder,
        prefill={"replicas": 1},
        target={"source": str(folder), "engine": {"override_generation_config": own} if own else {}},
    )
    app = AppConfig(models=(config,), security=SecurityConfig(max_output_tokens=100))
    prefill, verifier = (
        engine_args.llm_config(config, role, app, disaggregated=True).engine_kwargs
        for role in (config.prefill, config.verifier)
    )
    assert prefill == verifier
    generation = verifier["override_generation_config"]
    assert generation == {**(own or {}), "max_new_tokens": told}
    unbounded = llm_config(config, config.verifier, disaggregated=True).engine_kwargs
    assert unbounded.get("override_generation_config") == own
    lengths = [get_max_tokens(512, None, prompt, {}, generation["max_new_tokens"]) for prompt in (10, 500)]
    assert lengths == [told, 12]


def test_autoscaling_replaces_the_fixed_number(folder: Path) -> None:
    bounds = {"min_replicas": 0, "max_replicas": 3, "initial_replicas": 1}
    config = model(folder, prefill={"replicas": 5, "autoscaling": bounds})
    options = llm_config(config, config.prefill, disaggregated=True).deployment_config
    assert "num_replicas" not in options
    assert options["autoscaling_config"]["max_replicas"] == 3


def test_a_target_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = model(tmp_path / "nothing here")
    with pytest.raises(ConfigError, match=r"target\.source"):
        llm_config(config, config.verifier, disaggregated=False)


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [(None, 1, "nobind"), ("3", 1, "3"), ("0-3", 2, "0,1|2,3"), ("0-1", 3, "0|1|0,1")],
)
def test_core_binding(cores: str | None, ranks: int, expected: str) -> None:
    assert core_binding(cores, ranks) == expected


def drafting(folder: Path, placement: str, **fields) -> ModelConfig:
    source = str(REPO / "deployments" / "drafters" / "smollm2-135m")
    return model(folder, drafter={"placement": placement, "source": source}, **fields)


def test_a_drafter_puts_the_shim_into_both_engines_and_drafts_into_the_verifiers_only(folder: Path) -> None:
    config = drafting(folder, "remote", prefill={"replicas": 1})
    prefill = llm_config(config, config.prefill, disaggregated=True).engine_kwargs
    verifier = llm_config(config, config.verifier, disaggregated=True).engine_kwargs
    assert prefill["worker_cls"] == verifier["worker_cls"] == "dspark_ray.target.cpu_worker.DSparkCPUWorker"
    assert prefill["additional_config"]["dspark"]["placement"] == "prefill"
    assert verifier["additional_config"]["dspark"]["placement"] == "remote"
    assert "speculative_config" not in prefill
    assert verifier["speculative_config"]["num_speculative_tokens"] == 5


def test_gpu_engines_draft_with_the_runner_that_the_shim_extends_or_with_vllms_own_method(
    folder: Path,
) -> None:
    shim = drafting(folder, "colocated", verifier={"gpus": 1})
    made = llm_config(shim, shim.verifier, disaggregated=False)
    assert made.engine_kwargs["worker_cls"] == "dspark_ray.target.gpu_worker.DSparkGPUWorker"
    assert made.runtime_env["env_vars"]["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    native = drafting(folder, "native", verifier={"gpus": 1})
    kwargs = llm_config(native, native.verifier, disaggregated=False).engine_kwargs
    assert kwargs["speculative_config"]["method"] == "dspark"
    assert "worker_cls" not in kwargs


@pytest.mark.parametrize(
    ("shim", "speculates", "carried"),
    [
        ({"placement": "remote"}, True, True),
        ({"placement": "remote", "exactness": "ratio"}, True, False),
        ({}, True, False),  # native: vLLM's own worker
        ({}, False, False),
    ],
)
def test_biases_travel_only_where_our_sampler_applies_them_at_every_slot(
    shim: dict, speculates: bool, carried: bool
) -> None:
    """Else vLLM refuses them, instead of leaving them out of the drafts in silence."""
    shim = shim | ({"checkpoint": "/c"} if shim else {})
    config = SimpleNamespace(
        additional_config={"dspark": shim}, speculative_config=object() if speculates else None
    )
    assert carries_refused_parameters(config) is carried


def test_a_bias_for_no_token_is_refused_by_name() -> None:
    params = SamplingParams(logit_bias={3: 1.0, 999: 2.0}, min_p=0.1)
    with pytest.raises(VLLMValidationError, match="999"):
        carry_refused_parameters(params, 100)
    assert params.min_p == 0.1
    carry_refused_parameters(params, 1000)
    assert params.extra_args == {"dspark_logit_bias": [3, 1.0, 999, 2.0], "dspark_min_p": 0.1}
    assert not params.logit_bias
