"""What a replica of the drafter pool starts its engine with; the running pool is in tests/serve."""

import json
from pathlib import Path
from typing import Any

import pytest
import ray

from dspark_ray.config import DrafterConfig, ModelConfig
from dspark_ray.errors import ConfigError
from dspark_ray.serving import drafter, ports
from dspark_ray.serving.drafter import drafter_bundle, engine_env, engine_plan

SECRET_ENV = "TEST_POOL_SECRET"


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    options = {"placement": "remote", "source": str(tmp_path / "draft"), "threads": 3, "env": {"A": "b"}}
    target = {"source": str(tmp_path / "target"), "max_num_seqs": 100}
    return ModelConfig.model_validate({"id": "m", "target": target, "drafter": options})


def cluster_of(monkeypatch: pytest.MonkeyPatch, *alive: bool) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": state} for state in alive])
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.1.2.3")


def test_with_the_secret_a_drafter_listens_on_its_nodes_address(
    monkeypatch: pytest.MonkeyPatch, model: ModelConfig
) -> None:
    cluster_of(monkeypatch, True, True)
    monkeypatch.setenv(SECRET_ENV, "s3cret")
    plan = engine_plan(model, SECRET_ENV)
    assert plan.endpoint.startswith("tcp://10.1.2.3:")
    assert (plan.max_batch, plan.threads, plan.device) == (100, 3, "cpu")
    assert Path(plan.checkpoint).name == "draft"
    assert "s3cret" not in repr(plan)


@pytest.mark.parametrize("secret", [None, ""])
def test_without_the_secret_it_listens_on_the_loopback_and_only_on_a_single_node(
    monkeypatch: pytest.MonkeyPatch, model: ModelConfig, secret: str | None
) -> None:
    monkeypatch.delenv(SECRET_ENV, raising=False)
    if secret is not None:
        monkeypatch.setenv(SECRET_ENV, secret)
    cluster_of(monkeypatch, True, False)
    assert engine_plan(model, SECRET_ENV).endpoint.startswith(f"tcp://{ports.LOOPBACK}:")
    cluster_of(monkeypatch, True, True)
    with pytest.raises(ConfigError, match=f"{SECRET_ENV} is not set on this node"):
        engine_plan(model, SECRET_ENV)


def test_the_drafting_actor_takes_the_replicas_bundle(model: ModelConfig) -> None:
    role: dict[str, Any] = {"cpus": 0, "gpus": 0.5, "accelerator_type": "H100", "resources": {"fast": 1}}
    assert drafter_bundle(DrafterConfig(**role)) == {
        "CPU": drafter.LEAST_CPUS,
        "GPU": 0.5,
        "fast": 1,
        "accelerator_type:H100": 0.001,
    }
    assert engine_env(model) | {"OMP_NUM_THREADS": "3", "A": "b"} == engine_env(model)
