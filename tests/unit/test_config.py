"""Configuration: what is wrong in a file is named, at start-up, in one error."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from dspark_ray import config as config_module
from dspark_ray.config import FrozenModel, load_serve_file, parse_app_config
from dspark_ray.errors import CheckpointError, ConfigError, ExactnessError
from dspark_ray.sources import check_sources, resolve_source


def args(**model: Any) -> dict[str, Any]:
    """Args of an application with one model."""
    return {"models": [{"id": "m", "target": {"source": "org/name"}} | model]}


def test_defaults_are_plain_decoding_with_local_prefill():
    model = parse_app_config(args()).models[0]
    assert (model.drafter.placement, model.prefill.replicas, model.verifier.replicas) == ("none", 0, 1)
    assert model.exactness == "coupled"


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"models": []}, "models"),
        (args(targett={}), "models.0.targett"),
        (args(id="no spaces"), "models.0.id"),
        (args(target={"source": ""}), "models.0.target.source"),
        (args(target={"source": "a/b", "max_num_seqs": 0}), "models.0.target.max_num_seqs"),
        (args(target={"source": "a/b", "engine": {"worker_cls": "x"}}), "worker_cls"),
        (args(target={"source": "a/b", "engine": {"trust_remote_code": True}}), "trust_remote_code"),
        (args(verifier={"replicas": 0}), "verifier.replicas"),
        (args(prefill={"cpu_cores": "0-"}), "models.0.prefill.cpu_cores"),
        (
            args(verifier={"autoscaling": {"min_replicas": 3, "max_replicas": 2}}),
            "models.0.verifier.autoscaling",
        ),
        (args(drafter={"placement": "remote"}), "drafter.source"),
        (args(drafter={"placement": "native", "source": "a/b"}), "verifier.gpus"),
        (args(scheduling={"fixed_tau": 1.5}), "models.0.scheduling.fixed_tau"),
        ({**args(), "control": {"tau_min": 0.9}}, "control"),
        ({**args(), "telemetry": {"sample_interval_s": 0}}, "telemetry.sample_interval_s"),
        ({"models": args()["models"] * 2}, "ids must differ"),
        (
            args(
                target={"source": "a/b", "pipeline_parallel_size": 2},
                drafter={"placement": "remote", "source": "a/b"},
            ),
            "target.pipeline_parallel_size",
        ),
        (
            args(target={"source": "a/b", "data_parallel_size": 2}, verifier={"autoscaling": {}}),
            "set verifier.replicas",
        ),
        (
            args(target={"source": "a/b", "data_parallel_size": 2}, prefill={"autoscaling": {}}),
            "set prefill.replicas",
        ),
    ],
)
def test_a_wrong_field_is_named(bad: dict[str, Any], named: str):
    with pytest.raises(ConfigError, match="invalid configuration") as caught:
        parse_app_config(bad)
    assert named in str(caught.value)


def test_every_wrong_field_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        parse_app_config({**args(id="?"), "control": {"tau_min": 7}})
    assert "models.0.id" in str(caught.value)
    assert "control.tau_min" in str(caught.value)


def test_a_biased_combination_is_refused_naming_both_settings():
    with pytest.raises(ExactnessError, match=r"exactness 'probabilistic' .*drafter\.placement"):
        parse_app_config(args(exactness="probabilistic"))


def test_configuration_is_frozen_and_every_field_is_described():
    app = parse_app_config(args())
    with pytest.raises(ValidationError, match="frozen"):
        app.models[0].id = "other"  # type: ignore[misc]
    models = [
        cls for cls in vars(config_module).values() if isinstance(cls, type) and issubclass(cls, BaseModel)
    ]
    undescribed = [
        f"{cls.__name__}.{name}"
        for cls in models
        if cls not in (BaseModel, FrozenModel)
        for name, field in cls.model_fields.items()
        if not field.description
    ]
    assert undescribed == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a: [", "not YAML"),
        ("applications: 3", "applications"),
        ("[]", "applications"),
        ("applications: [{import_path: other.module:app}]", "import_path"),
        ("applications: [{import_path: 'dspark_ray.serving.app:build_app'}]", "models"),
    ],
)
def test_a_file_that_is_no_serve_config_of_ours(tmp_path: Path, text: str, named: str):
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(ConfigError, match=named):
        load_serve_file(tmp_path / "f.yaml")


def test_a_missing_file_and_a_binary_one(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load_serve_file(tmp_path / "nowhere.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not YAML"):
        load_serve_file(tmp_path / "binary.yaml")


def test_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = tmp_path / "models" / "smollm2-135m-instruct"
    model.mkdir(parents=True)
    monkeypatch.setenv("DSPARK_RAY_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"f: demo:smollm2 is not in .*fetch-demo"):
        resolve_source("demo:smollm2", "f")
    with pytest.raises(ConfigError, match=r"f: .*no config\.json"):
        resolve_source(str(model), "f")
    (model / "config.json").write_text("{}")
    assert resolve_source("demo:smollm2", "f") == str(model)
    monkeypatch.chdir(tmp_path)
    assert resolve_source("models/smollm2-135m-instruct", "f") == str(model)
    assert resolve_source("Qwen/Qwen3-8B", "f") == "Qwen/Qwen3-8B"
    for wrong in ("demo:other", "/no/such/folder", "./nor/this/one", "bare-name"):
        with pytest.raises(ConfigError, match=r"^f: "):
            resolve_source(wrong, "f")


TARGET = {"hidden_size": 64, "vocab_size": 500, "num_hidden_layers": 6}
DEEPSPEC = TARGET | {
    "num_hidden_layers": 1,
    "num_target_layers": 6,
    "target_layer_ids": [1, 4],
    "block_size": 4,
}
SPECULATORS = {
    "transformer_layer_config": {"hidden_size": 64, "vocab_size": 500, "num_hidden_layers": 1},
    "aux_hidden_state_layer_ids": [2, 5],
    "block_size": 4,
}


def check_pair(folder: Path, target: dict[str, Any], drafter: dict[str, Any], **settings: Any) -> None:
    for name, content in (("target", target), ("drafter", drafter)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(content))
    drafting = {"placement": "remote", "source": str(folder / "drafter"), **settings}
    check_sources(parse_app_config(args(target={"source": str(folder / "target")}, drafter=drafting)))


@pytest.mark.parametrize("drafter", [DEEPSPEC, SPECULATORS], ids=["deepspec", "speculators"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "text_config"])
def test_a_drafter_that_fits(tmp_path: Path, drafter: dict[str, Any], nested: bool):
    check_pair(tmp_path, {"text_config": TARGET} if nested else TARGET, drafter, block_size=4)


@pytest.mark.parametrize(
    ("drafter", "settings", "named"),
    [
        (DEEPSPEC | {"hidden_size": 65}, {}, r"drafter\.source: .*hidden_size is 65, .* 64"),
        (DEEPSPEC | {"vocab_size": 501}, {}, r"drafter\.source: .*vocab_size"),
        (DEEPSPEC | {"num_target_layers": 5}, {}, r"drafter\.source: .*num_target_layers is 5.* 6"),
        (DEEPSPEC | {"target_layer_ids": [1, 5]}, {}, r"drafter\.source: .*taps layers \[1, 5\]"),
        (DEEPSPEC | {"target_layer_ids": []}, {}, r"drafter\.source: .*taps"),
        (
            SPECULATORS | {"aux_hidden_state_layer_ids": [2, 6]},
            {},
            r"drafter\.source: .*taps layers \[1, 5\]",
        ),
        (DEEPSPEC, {"block_size": 5}, r"drafter\.block_size: 5 is more than the 4"),
    ],
)
def test_a_drafter_that_does_not_fit(
    tmp_path: Path, drafter: dict[str, Any], settings: dict[str, Any], named: str
):
    with pytest.raises(CheckpointError, match=r"^models\.0\." + named):
        check_pair(tmp_path, TARGET, drafter, **settings)


def test_an_unreadable_drafter_config(tmp_path: Path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "config.json").write_text("{")
    drafting = {"placement": "remote", "source": str(tmp_path / "d")}
    with pytest.raises(CheckpointError, match=r"models\.0\.drafter\.source: .*unreadable"):
        check_sources(parse_app_config(args(target={"source": str(tmp_path / "d")}, drafter=drafting)))


def test_a_dumped_configuration_loads_again():
    app = parse_app_config(args(drafter={"placement": "remote", "source": "a/b"}))
    assert parse_app_config(yaml.safe_load(yaml.safe_dump(app.model_dump(mode="json")))) == app


def test_an_unknown_field_is_answered_with_the_known_one_most_like_it(tmp_path: Path):
    bad = args(target={"source": "a/b", "max_num_seq": 3}, verifer={}, zzzz=1)
    with pytest.raises(ConfigError) as caught:
        load_serve_file(serve_file(tmp_path, None, **bad))
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{tmp_path / 'f.yaml'}: invalid configuration:"
    assert lines[1:] == [
        "  models.0.target.max_num_seq: no such field; did you mean 'max_num_seqs'?",
        "  models.0.verifer: no such field; did you mean 'verifier'?",
        "  models.0.zzzz: no such field",
    ]


def serve_file(tmp_path: Path, policy: Any, **fields: Any) -> Path:
    app = {"import_path": "dspark_ray.serving.app:build_app", "args": args() | fields}
    file = tmp_path / "f.yaml"
    file.write_text(yaml.safe_dump({"applications": [app | {"autoscaling_policy": policy}]}))
    return file


def test_arguments_of_the_autoscaling_policy_are_checked_with_the_file(tmp_path: Path):
    def policy(**kwargs: Any) -> dict[str, Any]:
        return {"policy_function": config_module.ROLE_SIZER, "policy_kwargs": kwargs}

    load_serve_file(serve_file(tmp_path, policy(target_ttft_s=1.0)))
    load_serve_file(serve_file(tmp_path, {"policy_function": "mine:policy", "policy_kwargs": {"x": 1}}))
    with pytest.raises(ConfigError, match=r"policy_kwargs\.target_ttft"):
        load_serve_file(serve_file(tmp_path, policy(target_ttft=1.0)))
    own_prefix = {"telemetry": {"key_prefix": "mine"}}
    with pytest.raises(ConfigError, match="another deployment's scheduler"):
        load_serve_file(serve_file(tmp_path, policy(), **own_prefix))
    load_serve_file(serve_file(tmp_path, policy(key_prefix="mine"), **own_prefix))
