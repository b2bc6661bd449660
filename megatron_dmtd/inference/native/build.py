"""Compile the C files of this folder for this machine, and load them.

The library is compiled in a temporary directory for each process, so that it always fits the CPU and nothing is left behind. It
shares torch's OpenMP threads: torch has already loaded `libgomp.so.1`, and the loader gives every later user the same one.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from megatron_dmtd.errors import CapabilityError

SOURCES = sorted(Path(__file__).parent.glob("*.c"))
COMPILERS = ("cc", "gcc")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-lm")
#: Wide vectors are an option of compilers for x86 only.
WIDE_VECTORS = "-mprefer-vector-width=512"
TIMEOUT_S = 300

POINTER, INTEGER, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES = {
    "dmtd_matmul": [POINTER] * 5 + [INTEGER] * 4,
    "dmtd_norm": [POINTER] * 3 + [INTEGER] * 2 + [FLOAT],
    "dmtd_gate": [POINTER] * 2 + [INTEGER] * 2,
    "dmtd_rotate_and_store": [POINTER] * 9 + [INTEGER] + [POINTER] * 2 + [INTEGER] * 5 + [FLOAT],
    "dmtd_attend": [POINTER] * 4 + [INTEGER] + [POINTER] * 8 + [INTEGER, POINTER] + [INTEGER] * 4,
}


@functools.cache
def load_kernels() -> ctypes.CDLL:
    """The compiled kernels.

    Raises:
        CapabilityError: There is no C compiler, or it cannot compile them.
    """
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise CapabilityError(
            found=f"no C compiler ({', '.join(COMPILERS)})",
            required="one, for the native kernels",
            remedy="install gcc, or decode with kernels='torch'",
        )
    # torch's OpenMP must be there first; see above.
    torch.ones(1)
    with tempfile.TemporaryDirectory(prefix="megatron_dmtd-") as folder:
        library = Path(folder) / "kernels.so"
        _compile(compiler, library)
        kernels = ctypes.CDLL(str(library))
    for name, types in SIGNATURES.items():
        function = getattr(kernels, name)
        function.argtypes, function.restype = types, None
    return kernels


def _compile(compiler: str, library: Path) -> None:
    failures = []
    for extra in ((WIDE_VECTORS,), ()):
        command = [compiler, *map(str, SOURCES), "-o", str(library), *FLAGS, *extra]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if finished.returncode == 0:
            return
        failures.append(finished.stderr.strip()[-500:])
    raise CapabilityError(
        found=f"{compiler} cannot compile the native kernels: {failures[-1]}",
        required="a C compiler with OpenMP and vector types",
        remedy="install gcc, or decode with kernels='torch'",
    )
