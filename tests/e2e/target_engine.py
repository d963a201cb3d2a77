"""Engines for the tests of dspark_ray.target, each scenario in a process of its own.

A scenario is a function of this folder's ``target_*.py`` modules that prints nothing and returns JSON.
`in_engine_process`
runs it in a fresh interpreter with the environment that a CPU engine wants, so that pytest's own process
imports neither vllm nor torch.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from dspark_ray.hardware import openmp_env

FOLDER = Path(__file__).parent
DEMO_MODEL = Path.home() / ".cache/dspark_ray/models/smollm2-135m-instruct"


def engine_environment() -> dict[str, str]:
    """The variables of a CPU engine process."""
    inherited = {name: value for name, value in os.environ.items() if name != "VLLM_CPU_KVCACHE_SPACE"}
    return {
        **inherited,  # the space variable would override kv_cache_memory_bytes
        "PYTHONPATH": os.pathsep.join([str(FOLDER.parents[1]), str(FOLDER)]),
        **openmp_env(),
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }


def in_engine_process(scenario: str, timeout_s: float = 300.0, **arguments: Any) -> Any:
    """Run ``module:function(**arguments)`` in a fresh process and return its result.

    Raises:
        RuntimeError: with the end of the process's output.
    """
    code = (
        "import importlib, json, sys\n"
        "module, function = sys.argv[1].split(':')\n"
        "result = getattr(importlib.import_module(module), function)(**json.loads(sys.argv[2]))\n"
        "open(sys.argv[3], 'w').write(json.dumps(result))\n"
        "import os; os._exit(0)\n"  # skip native destructors, which are slow and noisy
    )
    out = Path(os.environ.get("TMPDIR", "/tmp")) / f"target-scenario-{os.getpid()}.json"
    done = subprocess.run(
        [sys.executable, "-c", code, scenario, json.dumps(arguments), str(out)],
        env=engine_environment(), capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{scenario} failed:\n{done.stdout[-1500:]}\n{done.stderr[-6000:]}")
    try:
        return json.loads(out.read_text())
    finally:
        out.unlink()


def make_engine(**overrides: Any) -> Any:
    """A small fp32 engine of the demo model, in this process."""
    from vllm import LLM

    arguments = {
        "model": str(DEMO_MODEL), "dtype": "float32", "enforce_eager": True, "max_model_len": 512,
        "max_num_seqs": 16, "kv_cache_memory_bytes": 256 << 20, "enable_prefix_caching": False,
        "disable_log_stats": False,
    }  # fmt: skip
    return LLM(**(arguments | overrides))


def generate(llm: Any, prompts: list[Any], params: list[Any]) -> list[Any]:
    """Outputs in order, without a progress bar."""
    return llm.generate(prompts, params, use_tqdm=False)
