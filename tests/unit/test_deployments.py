"""Every Serve config that is shipped: valid for us, for Ray Serve, and for the documentation's claims."""

from pathlib import Path

import pytest
import yaml

from dspark_ray.config import load_serve_file

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*(ROOT / "deployments").rglob("*.yaml"), *(ROOT / "examples").rglob("*.yaml")])


def test_the_three_deployments_are_there():
    assert {"smollm2.yaml", "multi-model.yaml", "qwen3-8b-gpu.yaml"} <= {file.name for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_is_a_valid_serve_config_with_valid_args(file: Path):
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(yaml.safe_load(file.read_text()))
    apps = load_serve_file(file)
    assert {app.name for app in schema.applications} == set(apps)


def test_the_default_deployment_separates_prefill_from_decode_on_its_own_cores():
    (app,) = load_serve_file(ROOT / "deployments" / "smollm2.yaml").values()
    (model,) = app.models
    assert model.target.source == "demo:smollm2"
    assert (model.prefill.replicas, model.verifier.replicas) == (1, 1)
    assert {model.prefill.cpu_cores, model.verifier.cpu_cores} == {"0", "1"}


def test_the_gpu_deployment_autoscales_three_roles_of_the_published_pair():
    (app,) = load_serve_file(ROOT / "deployments" / "qwen3-8b-gpu.yaml").values()
    (model,) = app.models
    assert (model.target.source, model.drafter.source) == (
        "Qwen/Qwen3-8B",
        "deepseek-ai/dspark_qwen3_8b_block7",
    )
    for role in (model.prefill, model.drafter, model.verifier):
        assert role.gpus > 0
        assert role.autoscaling is not None
        assert role.autoscaling.max_replicas > role.autoscaling.min_replicas


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_whoever_autoscales_does_it_by_the_applications_policy(file: Path):
    """Serve imports it by this name in its controller and hands it these arguments."""
    from ray._common.utils import import_attr

    from dspark_ray.config import ROLE_SIZER

    for app in yaml.safe_load(file.read_text())["applications"]:
        roles = [role for model in app["args"]["models"] for role in model.values() if isinstance(role, dict)]
        policy = app.get("autoscaling_policy")
        assert (policy is not None) == any("autoscaling" in role for role in roles)
        if policy is not None:
            assert policy["policy_function"] == ROLE_SIZER
            import_attr(ROLE_SIZER)(**policy.get("policy_kwargs", {}))
