"""What a user_config changes on a running replica, and what it cannot break."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspark_ray.config import ControlConfig, SchedulingConfig, load_serve_file, parse_app_config
from dspark_ray.errors import ConfigError
from dspark_ray.serving.live import LiveSettings, reconfigure_engine

ARGS = {
    "models": [
        {
            "id": "m",
            "target": {"source": "/t"},
            "drafter": {"placement": "remote", "source": "/old"},
            "scheduling": {"mode": "tau", "min_verify_len": 1},
        }
    ],
    "control": {"tau_min": 0.3, "tau_max": 0.5},
}
WRONG = {
    "unknown field": {"control": {"tau_minimum": 0.1}},
    "unknown part": {"target": {"source": "/x"}},
    "bounds": {"control": {"tau_min": 0.6}},
    "mode": {"scheduling": {"mode": "fast"}},
    "no mapping": "fast",
    "a drafter that is not there": {"drafter_source": "relative/nowhere"},
}


@pytest.fixture
def settings() -> LiveSettings:
    config = parse_app_config(ARGS)
    return LiveSettings(config, config.models[0])


def test_named_fields_change_others_stay_and_nothing_named_is_as_started(settings: LiveSettings) -> None:
    assert settings.accept({"control": {"tau_min": 0.1}, "scheduling": {"mode": "fixed_tau"}})
    assert (settings.control.tau_min, settings.control.tau_max) == (0.1, 0.5)
    assert (settings.model.scheduling.mode, settings.model.scheduling.min_verify_len) == ("fixed_tau", 1)
    assert settings.accept({"scheduling": {"fixed_len": 2}})
    assert (settings.control.tau_min, settings.model.scheduling.mode) == (0.3, "tau")
    for nothing in ({}, None):
        assert settings.accept(nothing)
        assert settings.model == parse_app_config(ARGS).models[0]


@pytest.mark.parametrize("user_config", WRONG.values(), ids=WRONG)
def test_what_cannot_work_changes_nothing_and_raises_nothing(
    settings: LiveSettings, user_config: Any
) -> None:
    settings.accept({"control": {"tau_min": 0.1}})
    before = settings.control, settings.model
    assert not settings.accept(user_config)
    assert (settings.control, settings.model) == before


class Report:
    """An `EngineReport` that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.refuses = False

    def configure(self, control: ControlConfig, scheduling: SchedulingConfig) -> None:
        self.told.append((control.tau_min, scheduling.mode))

    async def swap_drafter(self, folder: Path) -> None:
        if self.refuses:
            raise ConfigError("other layers")
        self.told.append(folder)


async def test_a_drafter_is_swapped_once_and_one_that_does_not_fit_is_forgotten(
    settings: LiveSettings, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    report, user_config = Report(), {"drafter_source": str(tmp_path)}
    assert not await reconfigure_engine(settings, report, {"control": {"tau_min": 0.2}})
    report.refuses = True
    assert not await reconfigure_engine(settings, report, user_config)
    assert settings.model.drafter.source == "/old"
    report.refuses = False
    assert await reconfigure_engine(settings, report, user_config)
    assert not await reconfigure_engine(settings, report, user_config | {"control": {"tau_min": 0.4}})
    assert report.told == [(0.2, "tau"), (0.3, "tau"), (0.3, "tau"), tmp_path, (0.4, "tau")]


def test_an_ingress_follows_bounds() -> None:
    settings = LiveSettings(parse_app_config(ARGS))
    assert settings.accept({"control": {"tau_max": 0.9}})
    assert settings.control.tau_max == 0.9


@pytest.mark.parametrize("user_config", [WRONG[name] for name in ("unknown field", "bounds", "mode")])
def test_a_file_is_checked_before_it_is_deployed(tmp_path: Path, user_config: dict) -> None:
    import yaml

    app = SimpleNamespace(
        name="a",
        import_path="dspark_ray.serving.app:build_app",
        args=ARGS,
        deployments=[{"name": "Verifier:m", "user_config": user_config}],
    )
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump({"applications": [vars(app)]}))
    with pytest.raises(ConfigError, match="user_config"):
        load_serve_file(file)
    app.deployments[0]["user_config"] = {"control": {"tau_min": 0.31}}
    file.write_text(yaml.safe_dump({"applications": [vars(app)]}))
    assert load_serve_file(file)
