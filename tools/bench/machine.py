#!/usr/bin/env python3
"""What this machine can do at most, and how it multiplies.

    python tools/bench/machine.py --threads 2
    python tools/bench/machine.py --measure-again --json machine.json

Limits: bytes read from memory per second, and operations per second by type, of multiply-adds alone ("loop") and of the best
product of large matrices. The other benchmarks of this folder report shares of max(bytes / bandwidth, operations / peak) with the
better of the two.

Choices: which library multiplies by type, product and number of rows, as recorded in the user's cache; measured first if they are
not yet, or if asked to be measured again. A running training keeps the choices that it began with.

Exit status: 0 done, 2 refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dmtd.errors import ConfigError
from megatron_dmtd.infra.console import ending_quietly


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own number)")
    parser.add_argument("--measure-again", action="store_true", help="measure the choices again and replace the recorded ones")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Exit status: 0, or 2 if refused."""
    options = arguments(argv)
    import torch

    if options.threads is not None and options.threads < 1:
        error = ConfigError(found=f"--threads {options.threads}", required="at least one", remedy="leave it out for torch's own")
        print(f"ConfigError\n{error}", file=sys.stderr)
        return error.exit_status
    torch.set_num_threads(options.threads or torch.get_num_threads())
    from megatron_dmtd.platform import choices, machine, products

    device = torch.device("cpu")
    read = machine.read_bytes_per_s(device)
    print(f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    print(f"reading      {read / 1e9:8.1f} GB/s")
    peaks = {}
    for dtype in machine.TYPES:
        name = str(dtype).removeprefix("torch.")
        loop, product = machine.loop_flops_per_s(dtype), machine.product_flops_per_s(device, dtype)
        peaks[name] = {"loop": loop, "product": product}
        alone = f"{loop / 1e9:8.1f} GFLOP/s" if loop else "no loop for this type"
        print(f"{name:12} {alone}, best product {product / 1e9:.1f} GFLOP/s")
    path = choices.record_path()
    if options.measure_again:
        path.unlink(missing_ok=True)
    chosen = products.choices_of_this_machine()
    where = f"recorded in {chosen.path}" if chosen.path else f"not recorded: {path.parent} cannot be written"
    print(f"\nproducts, {where}\n{chosen}")
    if options.json:
        fields = {
            "threads": torch.get_num_threads(),
            "bytes_per_s": read,
            "flops_per_s": peaks,
            "choices": [dataclasses.asdict(choice) for choice in chosen.all],
        }
        options.json.write_text(json.dumps(fields, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
