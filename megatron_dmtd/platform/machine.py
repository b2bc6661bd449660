"""What this machine can do at most: bytes read per second, operations of matrix products per second and type.

A limit must not come from one library: another one might be twice as fast. On a CPU, peaks are the better of two: a loop of
multiply-adds that touches no memory, in C (`machine.c`), and the best of all products (`products`) of large matrices. On a GPU,
whose instructions C cannot reach, they are the product's. The best of several measurements counts, and the C code counts the CPU
time of its own threads: other programs would make the machine look slower than it is.

    limit of a piece of work = max(bytes / bandwidth, operations / peak)
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_dmtd.errors import CapabilityError
from megatron_dmtd.infra.native import NATIVE, load_library
from megatron_dmtd.platform import products

SOURCE = Path(__file__).with_suffix(".c")
FLAGS = ("-O3", NATIVE, "-ffp-contract=fast", "-funroll-loops", "-fopenmp", "-fPIC", "-shared")
#: Larger than any cache.
READ_BYTES = 512 << 20
#: Of twelve multiply-adds: a few hundredths of a second.
LOOP_REPEATS = 10_000_000
ROUNDS = 7
#: Width of the square matrices whose product is timed.
WIDTH = {"cpu": 1024, "cuda": 8192}
#: Types that peaks are measured in.
TYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The limits of one process's threads, or of its GPU."""

    bytes_per_s: float
    """Read from memory; 0 if it was not measured."""
    flops_per_s: Mapping[torch.dtype, float]
    """Peak by type; a multiply-add counts as two operations."""

    def seconds(self, *, num_bytes: float, flops: float, dtype: torch.dtype = torch.float32) -> float:
        """The least time for a piece of work that reads that many bytes and multiplies that much in `dtype`."""
        return max(num_bytes / self.bytes_per_s if num_bytes else 0.0, flops / self.flops_per_s[dtype])


def measure(device: torch.device, *, dtypes: tuple[torch.dtype, ...] = TYPES) -> Machine:
    """The limits of this process's device with the number of threads that torch now has."""
    return Machine(bytes_per_s=read_bytes_per_s(device), flops_per_s={dtype: peak_flops_per_s(device, dtype) for dtype in dtypes})


def peak_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """The better of the best product and, on a CPU, of multiply-adds alone."""
    return max(product_flops_per_s(device, dtype), loop_flops_per_s(dtype) if device.type == "cpu" else 0.0)


def product_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """The fastest product of large square matrices: by torch, and on a CPU by everything that `products` has."""
    width = WIDTH[device.type]
    left, right = (torch.ones(width, width, dtype=dtype, device=device) for _ in range(2))
    candidates = products.candidates(dtype).values() if device.type == "cpu" else [torch.mm]

    def one(multiply: Callable[..., torch.Tensor]) -> None:
        multiply(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with torch.no_grad():
        return 2 * width**3 / min(_best_s(lambda multiply=multiply: one(multiply)) for multiply in candidates)  # type: ignore[misc]


def loop_flops_per_s(dtype: torch.dtype) -> float:
    """Multiply-adds on all of torch's threads; 0 where there is no compiler, or no instruction for the type."""
    library, name = _library(), {torch.float32: "dmtd_fp32", torch.bfloat16: "dmtd_bf16"}.get(dtype)
    if library is None or name is None:
        return 0.0
    return max(getattr(library, name)(ctypes.c_int64(LOOP_REPEATS), _threads()) for _ in range(ROUNDS))


def read_bytes_per_s(device: torch.device) -> float:
    """Bandwidth of reading: in C with all of torch's threads, by torch's sum on a GPU or where there is no compiler."""
    numbers = torch.ones(READ_BYTES // 4, device=device)
    library = _library() if device.type == "cpu" else None
    if library is not None:
        pointer, count = ctypes.c_void_p(numbers.data_ptr()), ctypes.c_int64(numbers.numel())
        return max(library.dmtd_read(pointer, count, _threads()) for _ in range(ROUNDS))

    def read() -> None:
        numbers.sum()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return numbers.nbytes / _best_s(read)


def _threads() -> ctypes.c_int64:
    """No more than there are cores: the rates of threads that take turns would be added up."""
    return ctypes.c_int64(min(torch.get_num_threads(), len(os.sched_getaffinity(0))))


@functools.cache
def _library() -> ctypes.CDLL | None:
    torch.ones(1)  # torch's OpenMP must be there first: the library shares its threads
    try:
        library = load_library([SOURCE], remedy="limits are then those of torch's products", flags=FLAGS, compilers=("cc", "gcc"))
    except CapabilityError:
        return None
    for name in ("dmtd_fp32", "dmtd_bf16", "dmtd_read"):
        getattr(library, name).restype = ctypes.c_double
    return library


def _best_s(run: Callable[[], object], *, rounds: int = ROUNDS) -> float:
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best
