#!/usr/bin/env python3
"""Pretrain a small decoder, continue it as a Parallel DMTD model and as an ordinary one, export, decode, report.

Needs no download: the text is short stories that it writes itself, on which minutes of training show.

    python tools/quickstart.py
    python tools/quickstart.py --input stdlib --output quickstart-python   # real text: hours until a model this small is any good

Finished parts are not repeated: after an interruption, run the same command again. `make quickstart` also creates the
environment.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dmtd.errors import ConfigError, DMTDError
from megatron_dmtd.infra.console import ending_quietly

ROOT = Path(__file__).resolve().parents[1]


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="quickstart", help="folder to write (default: %(default)s)")
    parser.add_argument(
        "--input",
        nargs="+",
        default=["stories"],
        help="documents, in any form that tools/preprocess.py accepts (default: stories that it writes itself)",
    )
    parser.add_argument(
        "--heldout-fraction", type=float, default=0.02, help="fraction of the documents to hold out (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, help="steps of each of the three training runs (default: those of the recipes)")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens to decode per prompt, at most (default: %(default)s)")
    parser.add_argument("--timed-runs", type=int, default=5, help="timed decodings per model (default: %(default)s)")
    parser.add_argument(
        "--large-layers",
        type=int,
        nargs=2,
        default=[14, 4],
        metavar=("P", "S"),
        help="parallel and sequential layers of the model of random weights whose speed is measured; fewer where memory is short "
        "(default: 14 4, 1.3 GB)",
    )
    return parser


def check(arguments: argparse.Namespace) -> None:
    """Accept the arguments as they stand, or raise `ConfigError`."""
    for name in ("steps", "new_tokens", "timed_runs"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            option = "--" + name.replace("_", "-")
            raise ConfigError(found=f"{option} {value}", required="1 or more", remedy=f"raise {option}, or omit it")
    if min(arguments.large_layers) < 1:
        found = f"--large-layers {' '.join(map(str, arguments.large_layers))}"
        raise ConfigError(found=found, required="1 or more of each", remedy="omit --large-layers")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 refused or failed (the message says what to do), 130 interrupted."""
    arguments = make_parser().parse_args(argv)
    try:
        check(arguments)
        from megatron_dmtd.quickstart.jobs import run_quickstart, this_machine  # seconds of import
        from megatron_dmtd.quickstart.plan import Plan

        machine, platform = this_machine()
        plan = Plan(
            root=ROOT,
            directory=Path(arguments.output).resolve(),
            machine=machine,
            inputs=tuple(arguments.input),
            heldout_fraction=arguments.heldout_fraction,
            steps=arguments.steps,
            new_tokens=arguments.new_tokens,
            timed_runs=arguments.timed_runs,
            large_layers=tuple(arguments.large_layers),
        )
        print(f"quickstart on {machine.describe()}, in {plan.directory}", flush=True)
        summary = run_quickstart(plan, platform)
    except DMTDError as error:
        print(f"{type(error).__name__}\n{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run the same command to resume", file=sys.stderr)
        return 130
    print(f"\n{summary}\n\nThe report, with curves and more samples: {plan.directory / 'report.html'} (and report.md)")
    return 0


def _end_on_signal(number: int, frame: object) -> None:
    """Exit through an exception, so that whatever was started ends too."""
    sys.exit(128 + number)


if __name__ == "__main__":
    for stop in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, _end_on_signal)
    sys.exit(ending_quietly(main))
