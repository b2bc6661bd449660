"""Turn documents into the token files that training reads.

    python tools/preprocess.py --input corpus.jsonl --tokenizer tokenizer --output data/corpus
    python tools/preprocess.py --input stdlib --tokenizer tokenizer --output data/python --heldout-fraction 0.02

The second writes data/python-train and data/python-heldout, each as .bin, .idx and .json (a manifest). Which documents are held
out is decided by their names alone, so it is the same in every run and on every machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_dmtd.data.documents import open_source
from megatron_dmtd.data.preprocess import PreprocessOptions, preprocess
from megatron_dmtd.errors import DMTDError


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        help="in any number and mixture: .jsonl files, folders of text files, or `stdlib` (this Python's own library)",
    )
    parser.add_argument("--tokenizer", required=True, help="folder of a Hugging Face fast tokenizer")
    parser.add_argument("--output", required=True, help="prefix of the token files")
    parser.add_argument(
        "--heldout-fraction",
        type=float,
        default=0.0,
        help="share of the documents to hold out; above 0 there are two token files, OUTPUT-train and OUTPUT-heldout",
    )
    parser.add_argument("--mask-token-id", type=int, help="MASK id of the model (default: the tokenizer's mask token)")
    parser.add_argument("--pattern", nargs="+", default=["**/*.txt"], help="which files of a folder (default: %(default)s)")
    parser.add_argument("--text-key", default="text", help="key of the text in a .jsonl line (default: %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace token files that exist")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parsed = make_parser().parse_args(arguments)
    options = PreprocessOptions(
        tokenizer_dir=parsed.tokenizer,
        output_prefix=parsed.output,
        heldout_fraction=parsed.heldout_fraction,
        mask_token_id=parsed.mask_token_id,
        overwrite=parsed.overwrite,
        show_progress=not parsed.no_progress,
    )
    try:
        source = open_source(parsed.input, patterns=parsed.pattern, text_key=parsed.text_key)
        manifests = preprocess(source, options)
    except DMTDError as error:
        print(error, file=sys.stderr)
        return 1
    for prefix, manifest in manifests.items():
        print(f"{prefix}: {manifest.num_documents} documents, {manifest.num_tokens} tokens, {manifest.num_empty} empty left out")
    if source.skipped:
        print(f"{len(source.skipped)} documents that are not UTF-8 text left out; the manifests name them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
