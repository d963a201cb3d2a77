"""Import floors: what a module may load, checked on what Python really loaded."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "dspark_ray"

# What each floor may import of this package, beside itself (design: imports go downwards only).
BASE = {"config", "errors", "hardware", "protocol", "sources"}
FLOORS = {
    "config": {"errors"},
    "errors": set(),
    "hardware": set(),
    "protocol": {"errors"},
    "sources": {"config", "errors"},
    "decoding": BASE,
    "control": BASE,
    "drafter": BASE | {"decoding"},
    "target": BASE | {"decoding", "drafter"},
    "training": BASE | {"decoding", "control", "drafter"},  # calibrate reads rounds from telemetry
    "reference": BASE | {"decoding", "drafter"},
    "serving": BASE | {"decoding", "control", "drafter", "target"},
    "bench": BASE | {"decoding", "control", "drafter", "target", "training", "serving"},
    "cli": BASE,
}
# What a floor may not load on import, directly or through others; measured in a fresh interpreter.
LIGHT = ("cli", "config", "errors", "hardware", "protocol", "sources")
MAY_NOT_LOAD = {
    LIGHT: {"torch", "ray", "vllm", "transformers", "numpy"},
    ("control",): {"torch", "ray", "vllm", "transformers"},
    ("decoding",): {"ray", "vllm", "transformers"},
}
# Replicas that start without an engine: vLLM alone would cost each of them 20 seconds of CPU.
LIGHT_REPLICAS = {"dspark_ray.serving.drafter", "dspark_ray.serving.cluster_scheduler"}
# Where a package may be named in an import at all, also inside a function.
MAY_NAME = {"ray": {"serving", "bench"}, "vllm": {"target", "training", "serving", "bench"}}


def modules() -> list[str]:
    """Dotted names of all modules of the package."""
    names = []
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def floor_of(module: str) -> str | None:
    """The floor of a module of ours; None for the package itself and for other packages."""
    parts = module.split(".")
    return parts[1] if parts[0] == "dspark_ray" and len(parts) > 1 else None


def imports(module: str) -> set[str]:
    """All modules that a module's source names in an import, lazily or not."""
    file = ROOT / Path(*module.split("."))
    tree = ast.parse((file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def loaded(*names: str) -> set[str]:
    """Top-level packages in sys.modules after importing modules in a fresh interpreter."""
    code = (
        f"import importlib, json, sys\nfor name in {names!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT, text=True
    )
    return set(json.loads(output.stdout.splitlines()[-1]))


def test_every_floor_is_in_the_table():
    assert {floor for module in modules() if (floor := floor_of(module))} <= FLOORS.keys()


@pytest.mark.parametrize("module", [name for name in modules() if floor_of(name)])
def test_imports_go_downwards_only(module: str):
    floor = floor_of(module)
    assert floor is not None
    ours = imports(module) & set(modules()) - {"dspark_ray"}
    assert {name for name in ours if floor_of(name) not in FLOORS[floor] | {floor}} == set()


@pytest.mark.parametrize("floors", MAY_NOT_LOAD, ids="+".join)
def test_a_floor_loads_nothing_heavier_than_it_may(floors: tuple[str, ...]):
    names = [name for name in modules() if floor_of(name) in floors]
    assert loaded(*names) & MAY_NOT_LOAD[floors] == set()


@pytest.mark.parametrize("module", sorted(LIGHT_REPLICAS))
def test_replicas_without_an_engine_load_neither_vllm_nor_torch(module: str):
    assert loaded(module) & {"vllm", "torch", "transformers"} == set()


@pytest.mark.parametrize("package", MAY_NAME)
def test_a_package_is_named_only_where_it_belongs(package: str):
    users = {
        module for module in modules() if package in {name.partition(".")[0] for name in imports(module)}
    }
    assert {floor_of(module) for module in users} <= MAY_NAME[package], users


def test_help_loads_neither_torch_nor_ray_nor_vllm():
    code = (
        "import sys\nfrom dspark_ray.cli import main\ntry: main(['--help'])\n"
        f"finally: print('HEAVY', sorted(set(sys.modules) & {MAY_NOT_LOAD[LIGHT]!r}))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, cwd=ROOT, text=True, check=True
    )
    assert output.stdout.rstrip().endswith("HEAVY []")
    assert "fetch-demo" in output.stdout
