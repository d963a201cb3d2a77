"""The command line: light to start, and its errors are one line."""

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from dspark_ray.cli import LAZY_COMMANDS, main
from dspark_ray.config import parse_app_config

ROOT = Path(__file__).resolve().parents[2]


def test_help_names_every_command():
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for name in ["config", *LAZY_COMMANDS]:
        assert name in result.output


@pytest.mark.parametrize("name", sorted(LAZY_COMMANDS))
def test_every_command_in_the_table_exists(name: str):
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "--help" in result.output


def test_config_show_prints_what_loads_again():
    file = str(ROOT / "deployments" / "qwen3-8b-gpu.yaml")
    result = CliRunner().invoke(main, ["config", "show", file])
    assert result.exit_code == 0, result.output
    (app,) = yaml.safe_load(result.output).values()
    assert parse_app_config(app).control.tau_max == 0.75


def test_config_show_dry_run_prints_one_line():
    file = str(ROOT / "deployments" / "qwen3-8b-gpu.yaml")
    result = CliRunner().invoke(main, ["config", "show", "--dry-run", file])
    assert (result.exit_code, result.output.count("\n")) == (0, 1)
    assert "qwen3-8b" in result.output


def test_an_error_is_one_message_with_status_2_and_no_traceback(tmp_path: Path):
    (tmp_path / "f.yaml").write_text(
        "applications: [{import_path: 'dspark_ray.serving.app:build_app', args: "
        "{models: [{id: m, target: {source: /no/such/folder}}]}}]"
    )
    result = CliRunner().invoke(main, ["config", "show", "--dry-run", str(tmp_path / "f.yaml")])
    assert result.exit_code == 2
    assert result.output.startswith("Error: models.0.target.source: no folder '/no/such/folder'")
