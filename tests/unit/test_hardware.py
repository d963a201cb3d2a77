"""Whether a CPU multiplies bf16 is read off the flags of Linux."""

import platform

import pytest

from dspark_ray.hardware import bf16_in_cpuinfo


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
