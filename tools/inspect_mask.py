#!/usr/bin/env python3
"""Print the attention mask of the parallel layers of a variant.

First line: what the last shadow slot of the first document reads, cycle by cycle (1 a real token, 0 MASK). Then the complete mask
in training, where rows read columns; or, with --decode-cycle, the mask of the forward pass that begins that cycle in decoding.
Nothing is loaded or trained; a PNG of the training mask is written only on request.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import jsonargparse

from megatron_dmtd.config.load import RawHelp
from megatron_dmtd.config.sections import Variant
from megatron_dmtd.cycle import VANILLA, decoding_picture, history_picture, mask_picture, save_mask_png
from megatron_dmtd.errors import ConfigError, DMTDError, Refusal
from megatron_dmtd.infra.console import ending_quietly
from megatron_dmtd.infra.disk import disk_errors

EXAMPLES = """examples:
  python tools/inspect_mask.py --variant causal-norefresh --documents 12
  python tools/inspect_mask.py --variant bidirectional-refresh --documents 8,5 --png mask.png
  python tools/inspect_mask.py --variant causal-refresh --decode-cycle 2
  python tools/inspect_mask.py --variant causal-norefresh --documents 12 --window 6
"""


def parse_document_lengths(text: str) -> tuple[int, ...]:
    """`8,5` as `(8, 5)`. Raises `ConfigError` for anything but positive integers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(
            found=f"--documents {text!r}",
            required="lengths in tokens, positive integers separated by commas",
            remedy="write for example --documents 8,5",
        )
    return tuple(int(part) for part in parts)


def _parser() -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(
        prog="inspect_mask.py", description=f"{__doc__}\n{EXAMPLES}", formatter_class=RawHelp, allow_abbrev=False
    )
    parser.add_argument("--variant", type=Variant, default="bidirectional-refresh", help="variant to draw")
    parser.add_argument("--cycle-length", type=int, default=4, help="tokens per cycle")
    parser.add_argument(
        "--documents",
        type=str,
        default="8,5",
        help="lengths of the documents packed into the row; each is completed to whole cycles",
    )
    parser.add_argument(
        "--decode-cycle",
        type=int,
        default=-1,
        help="draw the forward pass that begins this cycle in decoding, from 0; -1 draws training",
    )
    parser.add_argument(
        "--window",
        type=int,
        default=0,
        help="sliding window: keys that a query sees at most, itself included; 0 is none",
    )
    parser.add_argument("--png", type=str, default="", help="also draw the grid to this file (needs matplotlib)")
    return parser


def check(args: jsonargparse.Namespace) -> None:
    """Accept the arguments as they stand, or raise `ConfigError`."""
    parse_document_lengths(args.documents)
    if args.cycle_length < 1:
        raise ConfigError(found=f"--cycle-length {args.cycle_length}", required="at least 1", remedy="the published models use 4")
    if args.window < 0:
        raise ConfigError(found=f"--window {args.window}", required="at least 1, or 0 for none", remedy="leave --window out")
    if args.decode_cycle >= 0 and args.variant == VANILLA:
        raise ConfigError(found="--decode-cycle with vanilla", required="a variant with cycles", remedy="omit --decode-cycle")
    if args.decode_cycle >= 0 and args.png:
        raise ConfigError(found="--decode-cycle with --png", required="one of them", remedy="the PNG shows the training grid")
    folder = Path(args.png).parent
    if not folder.is_dir():
        raise ConfigError(found=f"--png {args.png}", required="a file in an existing folder", remedy=f"create {folder}")


def run(args: jsonargparse.Namespace) -> None:
    """Print the requested pictures. Raises `ConfigError` before anything is printed or written."""
    check(args)
    rule = {"variant": args.variant, "cycle_length": args.cycle_length, "window": args.window or None}
    if args.decode_cycle >= 0:
        print(decoding_picture(args.decode_cycle, **rule))
        return
    lengths = parse_document_lengths(args.documents)
    if args.png:
        refusal = Refusal(ConfigError, required="a file that can be written", remedy="name another")
        with disk_errors(refusal, found=f"--png {args.png}"):
            save_mask_png(Path(args.png), lengths, **rule)
    print(history_picture(lengths[0], **rule))
    print()
    print(mask_picture(lengths, **rule))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    try:
        run(_parser().parse_args(argv))
    except DMTDError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
