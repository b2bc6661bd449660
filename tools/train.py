#!/usr/bin/env python3
"""Pretrain a Parallel DMTD model, or continue the training of one.

    python tools/train.py --config examples/quickstart/base.yaml --data.train '[data/train]'
    torchrun --nproc-per-node 2 tools/train.py --config a.yaml --parallel.pipeline 2 --optimizer.lr 1e-4

Settings come from YAML files and from options of the form --section.name; later ones override earlier ones. A run with
`checkpoint.dir` resumes from its newest checkpoint when it is started again. With `checkpoint.init_from`, a checkpoint or a
Hugging Face directory, a new run starts from its weights, and settings of the model that are not given are its own. Ctrl-C,
SIGTERM and SIGUSR1, on any rank, save and stop it (docs/fault_tolerance.md).
"""

# Helper processes may import this file, and signals must be handled from the start: import nothing heavy at the top.
import os
import signal
import sys

from megatron_dmtd.infra.console import ending_quietly
from megatron_dmtd.infra.processes import die_with, end_if_orphaned
from megatron_dmtd.training import exit_codes
from megatron_dmtd.training.health.signals import StopRequested, StopSignals


def main() -> int:
    """Exit status: see `megatron_dmtd/training/exit_codes.py`."""
    signals = StopSignals()
    signals.install()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank whose torchrun is gone would hold the run's lock for ever
        die_with(os.getppid(), number=signal.SIGTERM)
    end_if_orphaned()  # torchrun may have been ended while it was starting its ranks
    from megatron_dmtd.config import make_parser, parse, validate
    from megatron_dmtd.errors import DMTDError
    from megatron_dmtd.training.checkpoints.initial import run_config

    status = exit_codes.DONE
    try:
        parser = make_parser(description=f"{__doc__}\n{exit_codes.describe()}")
        config = run_config(parser, parse(parser))
        validate(config, world_size=int(os.environ.get("WORLD_SIZE", "1")))
        from megatron_dmtd.platform import prepare_megatron

        platform = prepare_megatron()
        from megatron_dmtd.parallel.groups import shut_down
        from megatron_dmtd.training.loop import run_training

        try:
            run_training(config, platform, signals)
        except StopRequested as stop:
            print(stop, file=sys.stderr)
            status = exit_codes.STOPPED
        shut_down()
    except DMTDError as error:
        print(f"{type(error).__name__}\n{error}", file=sys.stderr)
        status = error.exit_status
    # A launcher signals the remaining ranks once the first one has exited.
    signals.run_is_over()
    return status


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
