#!/usr/bin/env python3
"""Check every node of a job before its first step, with one process per rank, started as the training will be.

    srun python tools/preflight.py --hosts node1,node2 --folder /shared/work --output preflight.json

Checks versions, free disk space, the shared folder, clocks, GPUs and their arithmetic, transfers between neighbouring nodes and
an all-reduce over all ranks. Names the bad node and says what to do. examples/slurm/train.sh runs it. Exit status: 0 ready, 2 the
ranks cannot meet as they were told to, 8 not ready.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dmtd.errors import ConfigError, DMTDError
from megatron_dmtd.infra.console import ending_quietly
from megatron_dmtd.launch.verdict import Limits


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--hosts", required=True, help="the nodes in rank order, separated by commas")
    add("--folder", required=True, help="work folder shared by all nodes")
    add("--output", type=Path, required=True, help="JSON file for the results; OUTPUT.bad_nodes lists the nodes to avoid")
    add("--min-free-gib", type=float, default=0.0, help="required free space in the folder")
    add("--min-bandwidth-gb-s", type=float, default=0.0, help="slowest acceptable transfer between GPUs")
    add("--max-clock-skew-s", type=float, default=2.0, help="largest acceptable difference between clocks (default: %(default)s)")
    add("--timeout-s", type=float, default=120.0, help="time limit of each phase (default: %(default)s)")
    parsed = parser.parse_args(arguments)
    # torch takes seconds, which help and refusals need not wait for
    from megatron_dmtd.launch.preflight import FAILED, RankInfo, describe, run_preflight, write_result

    hosts = parsed.hosts.split(",")
    info = RankInfo(
        rank=int(os.environ["RANK"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        hosts=hosts,
        ranks_per_node=int(os.environ["WORLD_SIZE"]) // len(hosts),
        folder=parsed.folder,
        timeout_s=parsed.timeout_s,
    )
    limits = Limits(
        min_free_gib=parsed.min_free_gib,
        min_bandwidth_gb_s=parsed.min_bandwidth_gb_s,
        max_clock_skew_s=parsed.max_clock_skew_s,
    )
    try:
        result, is_good = run_preflight(info, limits)
    except DMTDError as error:
        print(f"{type(error).__name__}\n{error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else FAILED
    if result is not None:
        write_result(parsed.output, result)
        print(describe(result, info), flush=True)
    return 0 if is_good else FAILED


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
