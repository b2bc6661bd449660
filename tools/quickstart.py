#!/usr/bin/env python3
"""Pretrain a small decoder on real text, continue it as a Parallel DMTD model and as an ordinary one, export, decode, report.

Needs no download.

    python tools/quickstart.py

Finished parts are not repeated: after an interruption, run the same command again. `make quickstart` also creates the
environment.
"""

from __future__ import annotations

import argparse
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
    parser.add_argument("--input", nargs="+", default=["stdlib"], help="documents, in any form that tools/preprocess.py accepts")
    parser.add_argument(
        "--heldout-fraction", type=float, default=0.02, help="fraction of the documents to hold out (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, help="steps of each of the three training runs (default: those of the recipes)")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens to decode per prompt (default: %(default)s)")
    parser.add_argument("--timed-runs", type=int, default=5, help="timed decodings per model (default: %(default)s)")
    return parser


def check(arguments: argparse.Namespace) -> None:
    """Accept the arguments as they stand, or raise `ConfigError`."""
    for name in ("steps", "new_tokens", "timed_runs"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            option = "--" + name.replace("_", "-")
            raise ConfigError(found=f"{option} {value}", required="1 or more", remedy=f"raise {option}, or omit it")


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
        )
        print(f"quickstart on {machine.describe()}, in {plan.directory}", flush=True)
        report = run_quickstart(plan, platform)
    except DMTDError as error:
        print(f"{type(error).__name__}\n{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run the same command to resume", file=sys.stderr)
        return 130
    print(f"\n{report}\nThis report: {plan.directory / 'report.md'}, with the curves next to it")
    return 0


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
