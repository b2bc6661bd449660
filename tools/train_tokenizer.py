#!/usr/bin/env python3
"""Train a byte-level BPE tokenizer with EOS, PAD and MASK, and save it as a Hugging Face folder.

    python tools/train_tokenizer.py --input stdlib --vocab-size 8192 --output tokenizer --heldout-fraction 0.02

Use the same held-out fraction as for tools/preprocess.py, so that the tokenizer sees only training documents.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_dmtd.data.corpora.documents import RecordKeys, check_fraction, in_split
from megatron_dmtd.data.corpora.sources import open_source
from megatron_dmtd.data.corpora.tokenizer import train_bpe
from megatron_dmtd.errors import DMTDError
from megatron_dmtd.infra.console import ending_quietly


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        help="any number and mixture of .jsonl or .json (also with .gz, .bz2, .xz or .zst), .parquet, .arrow and .feather files, "
        "glob patterns of these, folders of text files, `stdlib` (this Python's own library), or hf:NAME?split=SPLIT (what "
        "`datasets` loads)",
    )
    parser.add_argument("--vocab-size", type=int, required=True, help="number of ids, including all bytes, EOS, PAD and MASK")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--heldout-fraction", type=float, default=0.0, help="fraction of the documents to hold out")
    parser.add_argument(
        "--min-frequency", type=int, default=2, help="minimum occurrences of a merged pair (default: %(default)s)"
    )
    parser.add_argument("--pattern", nargs="+", default=["**/*.txt"], help="files of a folder to read (default: %(default)s)")
    parser.add_argument("--text-key", default="text", help="key of the text in a .jsonl line (default: %(default)s)")
    parser.add_argument("--skip-bad", action="store_true", help="skip documents that cannot be used (exit status 3)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing tokenizer")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parsed = make_parser().parse_args(arguments)
    try:
        check_fraction(parsed.heldout_fraction)
        keys = RecordKeys(text=parsed.text_key)
        source = open_source(parsed.input, patterns=parsed.pattern, keys=keys, skip_bad=parsed.skip_bad)
        size = train_bpe(
            (document.text for document in source if in_split(document.name, "train", parsed.heldout_fraction)),
            vocab_size=parsed.vocab_size,
            output_dir=parsed.output,
            min_frequency=parsed.min_frequency,
            overwrite=parsed.overwrite,
            show_progress=not parsed.no_progress,
        )
    except DMTDError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: no tokenizer was written", file=sys.stderr)
        return 130
    print(f"{parsed.output}: {size} tokens")
    if size < parsed.vocab_size:
        print(f"the corpus has too few frequent pairs for {parsed.vocab_size}")
    if source.skipped:
        print(
            f"skipped {len(source.skipped)} documents that cannot be used, the first: {source.skipped[0].found}", file=sys.stderr
        )
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
