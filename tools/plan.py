#!/usr/bin/env python3
"""Show what a configuration will cost before anything is started.

    python tools/plan.py --config examples/qwen3-4b/bidirectional-refresh.yaml --parallel.pipeline 4 --world-size 32

Prints the placement of layers on stages, parameters, memory, FLOPs, the data that crosses each stage boundary and the pipeline
bubble. Refuses what cannot run, with exit status 2.
"""

import json
import sys

from megatron_dmtd.config import make_parser, parse
from megatron_dmtd.errors import DMTDError
from megatron_dmtd.infra.console import ending_quietly
from megatron_dmtd.training.checkpoints.initial import run_config
from megatron_dmtd.training.plan import describe, make_plan, require_memory, to_dict


def main() -> int:
    """Exit status: 0 planned, 2 refused."""
    parser = make_parser(description=__doc__ or "")
    parser.add_argument("--world-size", type=int, default=1, help="number of processes")
    parser.add_argument(
        "--device-gib", type=float, default=0.0, help="memory of one device in GiB; refuse what does not fit (0: no check)"
    )
    parser.add_argument("--cpu", action="store_true", help="estimate activations for a CPU, which has fewer fused kernels")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    try:
        arguments = parse(parser)
        plan = make_plan(run_config(parser, arguments), world_size=arguments.world_size, on_gpu=not arguments.cpu)
        if arguments.device_gib > 0:
            require_memory(plan, device_gib=arguments.device_gib)
    except DMTDError as error:
        print(f"{type(error).__name__}\n{error}", file=sys.stderr)
        return 2
    print(json.dumps(to_dict(plan), indent=2) if arguments.json else describe(plan))
    return 0


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
