"""What the READMEs name exists: files, configuration fields, commands, metrics."""

import re
from pathlib import Path

import pytest

from dspark_ray.cli import LAZY_COMMANDS, main
from dspark_ray.config import AppConfig, ModelConfig
from dspark_ray.control.metrics import METRICS

ROOT = Path(__file__).resolve().parents[2]
READMES = [ROOT / "README.md", ROOT / "cluster" / "README.md", ROOT / "deployments" / "README.md"]
readmes = pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)


@readmes
def test_links_and_files(readme: Path):
    text = readme.read_text()
    for target in re.findall(r"\]\((?!https://)([^)#]+)", text):
        assert (readme.parent / target).exists(), target
    files = re.findall(r"`([\w*][\w./*-]*\.(?:yaml|yml|py|sh|json))`", text)
    files += re.findall(r"(?<![\w/])(?:cluster|deployments|tests|dspark_ray)/[\w./*-]+\.\w+", text)
    assert files
    for file in files:
        assert list(readme.parent.glob(file)) or list(ROOT.glob(file)), file


@readmes
def test_configuration_fields(readme: Path):
    sections = {
        name: field.annotation
        for model in (AppConfig, ModelConfig)
        for name, field in model.model_fields.items()
        if hasattr(field.annotation, "model_fields")
    }
    named = re.findall(rf"`({'|'.join(sections)})\.(?!yaml)([a-z_]+)(\*?)", readme.read_text())
    for section, field, star in named:
        fields = sections[section].model_fields
        known = any(name.startswith(field) for name in fields) if star else field in fields
        assert known, f"{section}.{field}"


@readmes
def test_commands(readme: Path):
    known = {*LAZY_COMMANDS, *main.commands}
    assert set(re.findall(r"`dspark-ray ([a-z][a-z-]*)", readme.read_text())) <= known


@readmes
def test_metrics(readme: Path):
    known = {metric.exported_name for metric in METRICS}
    assert set(re.findall(r"ray_dspark_\w+", readme.read_text())) <= known
