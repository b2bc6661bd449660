#!/usr/bin/env python3
"""Time the low-precision formats on one core: kernels in C against plain torch, medians over rounds in which both take turns.

    python tools/bench/quantization.py
    python tools/bench/quantization.py --rows 4096 --width 4096 --rounds 7 --json times.json

Figures are milliseconds of CPU time per call, checks included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import torch

from megatron_dmtd.errors import ConfigError, DMTDError
from megatron_dmtd.infra.console import ending_quietly
from megatron_dmtd.quantization import FORMATS, arithmetic
from megatron_dmtd.quantization.formats import Format

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["nvfp4", "4over6", "mxfp4", "mxfp8"])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args(argv)


def milliseconds(call: Callable[[], object]) -> float:
    """CPU time of one call."""
    start = time.process_time()
    call()
    return 1e3 * (time.process_time() - start)


def measure(format: Format, x: torch.Tensor, rounds: int) -> dict[str, float]:
    """Medians of both directions, in C (`native_...`) and in plain torch (`torch_...`)."""
    quantized = format.quantize(x)  # compiles the kernels, before any clock runs
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        for kind in ("native", "torch"):
            chosen = arithmetic.REFERENCE if kind == "torch" else arithmetic.arithmetic_for(x)
            with mock.patch("megatron_dmtd.quantization.functions.arithmetic_for", lambda tensor, chosen=chosen: chosen):
                times.setdefault(f"{kind}_quantize_ms", []).append(milliseconds(lambda: format.quantize(x)))
                times.setdefault(f"{kind}_dequantize_ms", []).append(milliseconds(quantized.dequantize))
    return {name: statistics.median(values) for name, values in times.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Exit status: 0, or 2 if refused."""
    options = arguments(argv)
    torch.set_num_threads(1)
    try:
        if min(options.rows, options.width, options.rounds) < 1:
            raise ConfigError(found="a size or number of rounds below 1", required="at least 1", remedy="raise it")
        rows = []
        for dtype_name, dtype in TYPES.items():
            x = torch.randn(options.rows, options.width, generator=torch.Generator().manual_seed(0)).to(dtype)
            for name in options.formats:
                rows.append({"format": name, "input": dtype_name, **measure(FORMATS[name], x, options.rounds)})
                print(
                    "  ".join(
                        f"{key} {value:.1f}" if isinstance(value, float) else f"{value:>8}" for key, value in rows[-1].items()
                    )
                )
    except DMTDError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
