"""The engine's kernels in C: the files of this folder, compiled for this machine by `infra.native`.

The library shares torch's OpenMP threads: torch has already loaded `libgomp.so.1`, and the loader gives every later user the same
one.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from megatron_dmtd.errors import CapabilityError
from megatron_dmtd.infra.native import NATIVE, load_library

FOLDER = Path(__file__).parent
SOURCES, HEADERS = sorted(FOLDER.glob("*.c")), sorted(FOLDER.glob("*.h"))
#: Others bring an OpenMP of their own.
COMPILERS = ("cc", "gcc")
FLAGS = ("-O3", NATIVE, "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
#: Wide vectors are an option of compilers for x86 only.
WIDE_VECTORS = "-mprefer-vector-width=512"
REMEDY = "install gcc, or decode with kernels='torch'"

POINTER, INTEGER, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES = {
    "dmtd_matmul": [POINTER] * 5 + [INTEGER] * 4,
    "dmtd_norm": [POINTER] * 3 + [INTEGER] * 2 + [FLOAT],
    "dmtd_gate": [POINTER] * 3 + [INTEGER] * 2,
    "dmtd_step": [POINTER] * 3 + [INTEGER] * 2 + [FLOAT],
    "dmtd_gate_heads": [POINTER] * 2 + [INTEGER] + [POINTER] * 2 + [INTEGER] * 2 + [FLOAT],
    "dmtd_rotate_and_store": [POINTER] + [INTEGER] * 2 + [POINTER] * 9 + [INTEGER] + [POINTER] * 2 + [INTEGER] * 5 + [FLOAT],
    "dmtd_attend": (
        [POINTER, INTEGER]
        + [POINTER] * 3
        + [INTEGER]
        + [POINTER] * 8
        + [INTEGER, POINTER]
        + [INTEGER] * 4
        + [POINTER] * 2
        + [INTEGER]
    ),
    "dmtd_move": [POINTER] * 8 + [INTEGER] * 4,
}


@functools.cache
def load_kernels() -> ctypes.CDLL:
    """The compiled kernels.

    Raises:
        CapabilityError: There is no C compiler, or it cannot compile them.
    """
    torch.ones(1)  # its OpenMP must be there first; see above
    try:
        kernels = _library(*FLAGS, WIDE_VECTORS)
    except CapabilityError:
        kernels = _library(*FLAGS)
    for name, types in SIGNATURES.items():
        function = getattr(kernels, name)
        function.argtypes, function.restype = types, None
    return kernels


def _library(*flags: str) -> ctypes.CDLL:
    return load_library(SOURCES, remedy=REMEDY, flags=flags, headers=HEADERS, compilers=COMPILERS)
