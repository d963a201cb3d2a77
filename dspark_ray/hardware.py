"""What the machine under us can do, and how to have CPUs do it; read from the operating system alone."""

import platform
import sys
from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
BLOCKTIME = "100us"
"""How long OpenMP's threads spin for the next piece of work before they sleep."""
# x86-64 (AVX-512, AMX) and ARMv8.6 name their bf16 dot products so.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})


@cache
def cpu_computes_bf16() -> bool:
    """Whether this machine's CPU multiplies bf16 in hardware.

    Where it does not, libraries convert element by element: a matrix product takes 5 to 15 times what it takes in
    fp32. Unknown systems count as able, so that they keep what the checkpoint says.
    """
    return bf16_in_cpuinfo(CPUINFO.read_text(errors="replace")) if CPUINFO.is_file() else True


def bf16_in_cpuinfo(text: str) -> bool:
    """Whether the text of /proc/cpuinfo lists a bf16 product; true when it lists no features at all."""
    features = [line for line in text.splitlines() if line.lower().startswith(("flags", "features"))]
    if not features or platform.machine() not in {"x86_64", "aarch64"}:
        return True
    return not _BF16_FLAGS.isdisjoint(features[0].split())


def openmp_env() -> dict[str, str]:
    """Environment with Intel's OpenMP, where this Python environment has it; it takes effect at a process's start."""
    # Threads that spin while they wait take the cores of the engines beside this one: a verifier's are still
    # spinning when its drafter begins, and the other way round. Long enough to get from one layer to the next.
    env = {"KMP_BLOCKTIME": BLOCKTIME}
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    return env | {"LD_PRELOAD": str(library)} if library.is_file() else env
