"""Health of one node before a run: versions, disk, GPUs, arithmetic. Measures only; `verdict.py` judges."""

from __future__ import annotations

import importlib.metadata
import platform as python_platform
import shutil
import subprocess
import time
from dataclasses import dataclass, field

import torch

import megatron_dmtd
from megatron_dmtd.platform.device import Platform

#: columns of nvidia-smi, in the order of `Gpu`
_COLUMNS = (
    "index",
    "name",
    "driver_version",
    "temperature.gpu",
    "memory.used",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_throttle_reasons.hw_slowdown",
)
_NVIDIA_SMI_S = 60.0
_PACKAGES = ("torch", "megatron-core", "transformers", "numpy")
#: side length of the square test matrices
_SIDE_CPU, _SIDE_GPU = 256, 8192
_REPEATS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU as reported by nvidia-smi. Unknown values are 0 or false."""

    index: int
    name: str
    driver: str
    temperature_c: float
    used_gib: float
    """Memory in use before this job's ranks allocate any."""
    uncorrected_errors: int
    """Uncorrected ECC errors since the driver was loaded."""
    is_slowed: bool
    """Whether the hardware throttles its clocks because of heat or power."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Report of one rank. Fields with defaults are filled in by the first rank of each node, or once ranks can communicate."""

    rank: int
    host: str
    device: str
    versions: dict[str, str]
    matmul_gflops: float
    matmul_is_right: bool
    free_gib: float | None = None
    gpus: tuple[Gpu, ...] = ()
    shares_folder: bool = True
    clock_s: float = 0.0
    """Its clock, read at the same moment on all ranks, up to the latency of a message."""
    errors: tuple[str, ...] = field(default=())
    """Failures on this rank that no other field can express."""


def versions() -> dict[str, str]:
    """Versions of everything that must be the same on all ranks."""
    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    where = megatron_dmtd.__path__[0]
    return {"python": python_platform.python_version(), **found, "megatron_dmtd": f"{megatron_dmtd.__version__} in {where}"}


def free_gib(folder: str) -> float:
    """Free space, in GiB."""
    return shutil.disk_usage(folder).free / 2**30


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Parse nvidia-smi's CSV output without header and units."""
    gpus = []
    for line in filter(None, text.splitlines()):
        cells = [cell.strip() for cell in line.split(",")]
        assert len(cells) == len(_COLUMNS), line
        gpus.append(
            Gpu(
                index=int(cells[0]),
                name=cells[1],
                driver=cells[2],
                temperature_c=_number(cells[3]),
                used_gib=_number(cells[4]) / 1024,
                uncorrected_errors=int(_number(cells[5])),
                is_slowed=cells[6] == "Active",
            )
        )
    return tuple(gpus)


def _number(cell: str) -> float:
    """A number; 0 for `[N/A]` and the like, as consumer GPUs report for ECC."""
    return float(cell) if cell.replace(".", "", 1).isdigit() else 0.0


def read_gpus() -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """The node's GPUs, and errors of the query. A node without nvidia-smi has none."""
    if shutil.which("nvidia-smi") is None:
        return (), ()
    command = ["nvidia-smi", f"--query-gpu={','.join(_COLUMNS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S)
    except subprocess.TimeoutExpired:
        return (), (f"nvidia-smi does not answer within {_NVIDIA_SMI_S:g} s",)
    if answer.returncode != 0:
        return (), (f"nvidia-smi: {(answer.stdout + answer.stderr).strip()[-300:]}",)
    return parse_gpus(answer.stdout), ()


def multiply(platform: Platform) -> tuple[float, bool]:
    """GFLOP/s of a matrix product (best of several), and whether every product was correct bit for bit."""
    side = _SIDE_GPU if platform.is_cuda else _SIDE_CPU
    dtype = torch.bfloat16 if platform.is_cuda else torch.float32
    # Rows of ones times a matrix of small integers: sums are exact in every type and order.
    ones_MM = torch.ones(side, side, dtype=dtype, device=platform.device)
    diagonal_M = (torch.arange(side, device=platform.device) % 7).to(dtype)
    matrix_MM = torch.diag(diagonal_M)
    best_s, is_right = float("inf"), True
    for _ in range(_REPEATS):
        platform.synchronize()
        started = time.perf_counter()
        product_MM = ones_MM @ matrix_MM
        platform.synchronize()
        best_s = min(best_s, time.perf_counter() - started)
        is_right = is_right and bool((product_MM == diagonal_M).all())
    return 2 * side**3 / best_s / 1e9, is_right
