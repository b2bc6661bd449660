#!/usr/bin/env python3
"""Turn documents into the token files that training reads, and inspect such files.

    python tools/preprocess.py --input 'corpus/*.jsonl.zst' --tokenizer tokenizer --output data/corpus
    python tools/preprocess.py --input stdlib --tokenizer tokenizer --output data/python --heldout-fraction 0.02
    python tools/preprocess.py --input chats.jsonl --messages-key messages --tokenizer tokenizer --output data/chats
    python tools/preprocess.py merge data/corpus data/corpus-*-of-*.json
    python tools/preprocess.py verify data/corpus --tokenizer tokenizer
    python tools/preprocess.py inspect data/corpus --tokenizer tokenizer --document 3
    python tools/preprocess.py packing data/corpus --seq-length 4096
    python tools/preprocess.py rows data/corpus --tokenizer tokenizer --seq-length 256

The first command writes data/corpus.bin, .idx and .json (a manifest); with a held-out fraction there are two sets of files,
-train and -heldout. A document's name alone decides whether it is held out, so the split is the same in every run and on every
machine. An interrupted run leaves data/corpus.partial/, and the same command resumes from there. `merge` joins the files of
several runs (--shard) into what a single run writes.

Exit status: 0 all documents included, 1 refused or failed, 2 wrong usage, 3 finished with documents skipped (--skip-bad), 130
interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from megatron_dmtd.data.batches.packing import Packing
from megatron_dmtd.data.corpora.documents import RecordKeys
from megatron_dmtd.data.corpora.preprocess import PreprocessOptions, Result, preprocess
from megatron_dmtd.data.corpora.sources import open_inputs
from megatron_dmtd.errors import DataError, DMTDError
from megatron_dmtd.infra.console import ending_quietly

_INPUTS = (
    "any number and mixture of .jsonl and .json files (also with .gz, .bz2, .xz or .zst), .parquet, .arrow and .feather files, "
    "glob patterns of these, folders of text files, `stdlib` (this Python's own library), or "
    "hf:NAME?name=CONFIG&split=SPLIT&streaming=1 (what `datasets` loads)"
)


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    try:
        return int(index), int(count)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N") from None


def make_parser() -> argparse.ArgumentParser:
    """The command line of tokenising."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--input", nargs="+", required=True, help=_INPUTS)
    add("--tokenizer", required=True, help="folder of a Hugging Face fast tokenizer")
    add("--output", required=True, help="prefix of the token files")
    add(
        "--heldout-fraction",
        type=float,
        default=0.0,
        help="fraction of the documents to hold out; above 0 there are two token files, OUTPUT-train and OUTPUT-heldout",
    )
    add("--mask-token-id", type=int, help="the model's MASK id (default: the tokenizer's mask token)")
    add("--pattern", nargs="+", default=["**/*.txt"], help="files of a folder to read (default: %(default)s)")
    add("--text-key", default="text", help="key or column of the text (default: %(default)s)")
    add(
        "--messages-key",
        help="key or column of a chat's messages: read chats, with the tokenizer's chat template; `tools`, `documents` and "
        "`chat_template_kwargs` of a record are given to it",
    )
    add("--assistant-loss", action="store_true", help="for chats, compute the loss only on what the assistant wrote")
    add(
        "--add-bos",
        choices=["auto", "yes", "no"],
        default="auto",
        help="begin each text with BOS, as the model's prompts will (default: auto, as the tokenizer does; chats begin as their "
        "template says)",
    )
    add("--skip-bad", action="store_true", help="skip and count documents that cannot be used (exit status 3)")
    add("--dtype", choices=["auto", "uint16", "int32"], default="auto", help="type of the token ids (default: the smallest)")
    add("--encoder", choices=["gigatoken", "tokenizers"], help="tokenising library (default: gigatoken if its ids are equal)")
    add("--workers", type=int, help="tokenising processes (default: one per CPU)")
    add("--shard", type=_shard, default=(0, 1), metavar="I/N", help="read only part I, from 0, of N parts of the inputs")
    add("--save-seconds", type=float, default=10.0, help="seconds between saves to resume from (default: %(default)s)")
    add("--overwrite", action="store_true", help="replace existing token files and discard another unfinished run")
    add("--no-progress", action="store_true", help="no progress bar")
    return parser


def check_inputs(arguments: Sequence[str], *, come_later: bool) -> None:
    """Refuse options that are not possible and, unless they `come_later`, inputs that are not there. Raises `DMTDError`."""
    if arguments and arguments[0] in _COMMANDS:
        return
    parsed = make_parser().parse_args(arguments)
    if come_later:
        return
    keys = RecordKeys(text=parsed.text_key, messages=parsed.messages_key)
    open_inputs(parsed.input, patterns=parsed.pattern, keys=keys)
    if not Path(parsed.tokenizer).is_dir():
        raise DataError(
            found=f"no directory {parsed.tokenizer} (--tokenizer)",
            required="the directory of a Hugging Face fast tokenizer",
            remedy="correct --tokenizer",
        )


def _run(arguments: Sequence[str]) -> int:
    parsed = make_parser().parse_args(arguments)
    keys = RecordKeys(text=parsed.text_key, messages=parsed.messages_key)
    options = PreprocessOptions(
        tokenizer_dir=parsed.tokenizer,
        output_prefix=parsed.output,
        heldout_fraction=parsed.heldout_fraction,
        mask_token_id=parsed.mask_token_id,
        add_bos=parsed.add_bos,
        keys=keys,
        assistant_loss=parsed.assistant_loss,
        skip_bad=parsed.skip_bad,
        dtype=parsed.dtype,
        encoder=parsed.encoder,
        num_workers=parsed.workers,
        shard=parsed.shard,
        overwrite=parsed.overwrite,
        save_seconds=parsed.save_seconds,
        show_progress=not parsed.no_progress,
    )
    inputs = open_inputs(parsed.input, patterns=parsed.pattern, keys=keys)
    return _report(preprocess(inputs, options, say=lambda message: print(message, flush=True)))


def _report(result: Result) -> int:
    for prefix, manifest in result.manifests.items():
        print(f"{prefix}: {manifest.num_documents} documents, {manifest.num_tokens} tokens")
        if manifest.num_without_targets:
            print(f"{prefix}: {manifest.num_without_targets} documents without a target: they teach nothing", file=sys.stderr)
    manifest = next(iter(result.manifests.values()))
    if not manifest.skipped_counts:
        return 0
    counts = ", ".join(f"{kind}: {count}" for kind, count in manifest.skipped_counts.items())
    total = sum(manifest.skipped_counts.values())
    print(f"skipped {total} documents ({counts}); the manifest lists them", file=sys.stderr)
    return 3


def _merge(arguments: Sequence[str]) -> int:
    from megatron_dmtd.data.corpora.merge import merge

    parser = argparse.ArgumentParser(
        prog="preprocess.py merge",
        description="Join all shards of one source into the token file that a single run would have written. The shards are "
        "verified first, and kept.",
    )
    parser.add_argument("output", help="prefix of the token file to write")
    parser.add_argument("prefix", nargs="+", help="the shards, in any order: prefixes, or their manifests (data/c-*-of-*.json)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing token file")
    parser.add_argument(
        "--save-seconds", type=float, default=10.0, help="seconds between saves to resume from (default: %(default)s)"
    )
    parsed = parser.parse_args(arguments)
    manifest = merge(
        parsed.output,
        parsed.prefix,
        overwrite=parsed.overwrite,
        save_seconds=parsed.save_seconds,
        say=lambda message: print(message, flush=True),
    )
    return _report(Result(manifests={parsed.output: manifest}, choice=None, resumed=False))


def _verify(arguments: Sequence[str]) -> int:
    from megatron_dmtd.data.corpora.retokenised import retokenise
    from megatron_dmtd.data.corpora.verify import verify

    parser = argparse.ArgumentParser(
        prog="preprocess.py verify",
        description="Check token files against their manifests and, with --tokenizer, a sample of their documents against what "
        "the Hugging Face tokenizer makes of the same texts.",
    )
    parser.add_argument("prefix", nargs="+")
    parser.add_argument("--tokenizer", help="folder of the tokenizer that they should have been made with")
    parser.add_argument(
        "--sample", type=int, default=200, metavar="N", help="documents to tokenise again; 0: none (default: %(default)s)"
    )
    parsed = parser.parse_args(arguments)
    for prefix in parsed.prefix:
        found = verify(prefix, tokenizer_dir=parsed.tokenizer)
        lengths = f"{found.shortest} to {found.longest} tokens each, {found.dtype}"
        print(f"{prefix}: {found.num_documents} documents, {found.num_tokens} tokens, {lengths}: in order")
        if found.manifest is None:
            print(f"{prefix}: no manifest, so only the format was checked")
        if parsed.tokenizer is not None and parsed.sample > 0:
            again = retokenise(prefix, parsed.tokenizer, num_documents=parsed.sample)
            equal = f"{again.num_documents} documents tokenised again by the reference: {again.num_tokens} equal ids"
            print(f"{prefix}: {f'nothing tokenised again: {again.reason}' if again.reason else equal}")
    return 0


def _inspect(arguments: Sequence[str]) -> int:
    from megatron_dmtd.data.corpora.verify import inspect

    parser = argparse.ArgumentParser(
        prog="preprocess.py inspect",
        description="Show documents as text: `|` marks the start of a cycle, [tokens] are not targets (grey on a terminal).",
    )
    parser.add_argument("prefix")
    parser.add_argument("--tokenizer", required=True, help="folder of the tokenizer that it was made with")
    parser.add_argument("--document", type=int, default=0, help="first document to show (default: 0)")
    parser.add_argument("--count", type=int, default=1, help="number of documents (default: 1)")
    parser.add_argument("--cycle-length", type=int, default=4, help="tokens per cycle (default: 4)")
    parsed = parser.parse_args(arguments)
    documents = range(parsed.document, parsed.document + parsed.count)
    lines = inspect(
        parsed.prefix, documents, tokenizer_dir=parsed.tokenizer, cycle_length=parsed.cycle_length, color=sys.stdout.isatty()
    )
    for line in lines:
        print(line)
    return 0


def _packing(arguments: Sequence[str]) -> int:
    from megatron_dmtd.data.batches.dataset import PackedDataset

    parser = argparse.ArgumentParser(
        prog="preprocess.py packing", description="Show how much padding and how many cut documents each packing method causes."
    )
    parser.add_argument("prefix", nargs="+", help="token files that form one corpus")
    parser.add_argument("--seq-length", type=int, required=True, help="slots per row")
    parser.add_argument("--cycle-length", type=int, default=4, help="tokens per cycle (default: 4)")
    parsed = parser.parse_args(arguments)
    for packing in get_args(Packing):
        dataset = PackedDataset(
            parsed.prefix,
            seq_length=parsed.seq_length,
            cycle_length=parsed.cycle_length,
            pad_token_id=0,
            shuffle_seed=0,
            packing=packing,
        )
        print(f"{packing}: {dataset.report()}")
    return 0


def _rows_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preprocess.py rows",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Show packed rows as training reads them: text, borders of documents, cycles, targets, padding.\n\n"
        "  python tools/preprocess.py rows data/corpus-train --tokenizer tokenizer --seq-length 256 --packing best-fit\n"
        "  python tools/preprocess.py rows --config recipe.yaml --row 40 --count 8      # rows 40 to 47 of that run\n\n"
        "`|` marks the start of a cycle; [tokens] are not targets (grey on a terminal); a dot is a slot of padding; after an\n"
        "arrow comes the target of the last slot of a document's part.",
    )
    add = parser.add_argument
    add("prefix", nargs="*", help="token files that form one corpus (default: data.train of --config)")
    add("--config", help="a recipe or a checkpoint's config.yaml, whose settings count where no option is given")
    add("--held-out", action="store_true", help="show data.valid of --config")
    add("--tokenizer", help="folder of the tokenizer that made the files")
    add("--row", type=int, default=0, help="first row to show, counted over all epochs (default: 0)")
    add("--count", type=int, default=1, help="number of rows (default: 1)")
    add("--seq-length", type=int, help="slots per row")
    add("--cycle-length", type=int, help="tokens per cycle (default: 4)")
    add("--packing", choices=get_args(Packing), help="how documents fill rows (default: concatenate)")
    add("--shuffle-seed", type=int, help="seed of the order of documents (default: 1234)")
    add("--slots", action="store_true", help="a table with a line per slot instead of running text")
    add("--html", metavar="FILE", help="write a page instead; pointing at a token shows its slot, position, ids and target")
    add("--color", choices=("auto", "always", "never"), default="auto", help="default: auto, on a terminal")
    return parser


def _rows(arguments: Sequence[str]) -> int:
    from megatron_dmtd.data.corpora.row_view import slot_lines, text_lines, to_html, view_row
    from megatron_dmtd.data.corpora.shown_rows import RowOptions, open_rows
    from megatron_dmtd.data.corpora.tokenizer import load_tokenizer
    from megatron_dmtd.infra.files import write_atomically

    parser = _rows_parser()
    parsed = parser.parse_args(arguments)
    if parsed.row < 0 or parsed.count < 1:
        parser.error("--row counts from 0, and --count from 1")
    fields = {item.name for item in dataclasses.fields(RowOptions)}
    shown = open_rows(RowOptions(**{name: value for name, value in vars(parsed).items() if name in fields}))
    tokenizer = load_tokenizer(shown.tokenizer)
    views = (
        view_row(shown.rows, index, tokenizer=tokenizer, cycle_length=shown.cycle_length)
        for index in range(parsed.row, parsed.row + parsed.count)
    )
    if parsed.html:
        write_atomically(Path(parsed.html), to_html(list(views)))
        return 0
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may know fewer characters than the corpus
    is_colored = parsed.color == "always" or (parsed.color == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
    for view in views:
        for line in (slot_lines if parsed.slots else text_lines)(view, color=is_colored):
            print(line)
    return 0


_COMMANDS = {"merge": _merge, "verify": _verify, "inspect": _inspect, "packing": _packing, "rows": _rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if arguments and arguments[0] in _COMMANDS:
            return _COMMANDS[arguments[0]](arguments[1:])
        return _run(arguments)
    except DMTDError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: run the same command to resume", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
