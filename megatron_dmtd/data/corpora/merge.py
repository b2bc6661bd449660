"""The shards of one source as one token file: the bytes that a single run over the source would have written.

Shards that do not belong together, or of which one is missing or damaged, are refused before a byte is written. Tokens are
streamed, and an interrupted merge continues like any run, in `OUTPUT.partial/`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dmtd.data.batches.manifest import Manifest, dump_manifest, loss_prefix, read_manifest
from megatron_dmtd.data.batches.token_file import TokenFile
from megatron_dmtd.data.corpora.documents import Split
from megatron_dmtd.data.corpora.encoding import SplitTokens
from megatron_dmtd.data.corpora.output import MAX_SKIPPED_NAMES, PartialOutput, final_paths
from megatron_dmtd.data.corpora.verify import verify
from megatron_dmtd.errors import DataError

#: approximate number of tokens copied at once; a document may be longer
CHUNK_TOKENS = 1 << 24
#: what all shards of a source have in common, with its name for messages
_COMMON = {
    "source": "source",
    "source_sha256": "size of an input",
    "block_bytes": "size of blocks",
    "split": "split",
    "heldout_fraction": "held-out fraction",
    "tokenizer_sha256": "tokenizer",
    "vocab_size": "vocabulary size",
    "eos_token_id": "EOS id",
    "add_bos": "setting of BOS",
    "bos_token_id": "BOS id",
    "pad_token_id": "PAD id",
    "mask_token_id": "MASK id",
    "dtype": "type",
    "loss": "loss",
    "order": "order",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    prefix: str
    manifest: Manifest
    index: int
    count: int


def merge(
    output_prefix: str,
    prefixes: Sequence[str],
    *,
    overwrite: bool = False,
    save_seconds: float = 10.0,
    chunk_tokens: int = CHUNK_TOKENS,
    say: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Write the token file `output_prefix` of all shards of one source, given in any order, and return its manifest.

    Raises `DataError` if a shard is missing, duplicate, damaged, or made from another source or with another tokenizer or option,
    or if the output exists. The shards are not removed.
    """
    parts = _parts(prefixes)
    for part in parts:
        verify(part.prefix)
        say(f"{part.prefix}: shard {part.index} of {part.count}, in order")
    first = parts[0].manifest
    split: Any = first.split
    outputs: dict[Split, str] = {split: output_prefix}
    header = {"shards": [part.manifest.bin_sha256 for part in parts], "chunk": chunk_tokens}
    if output_prefix in (part.prefix for part in parts):
        raise DataError(found=f"{output_prefix} as shard and output", required="another output", remedy="name another output")
    existing = [str(path) for path in final_paths(outputs) if path.exists()]
    if existing and not overwrite and not PartialOutput.is_publishing(output_prefix, header):
        raise DataError(
            found=f"{', '.join(existing)} already there", required="new files", remedy="name another output, or pass --overwrite"
        )
    with PartialOutput(
        output_prefix,
        outputs,
        header=header,
        dtype=np.dtype(first.dtype).type,
        with_loss=first.loss == "assistant",
        overwrite=overwrite,
        save_seconds=save_seconds,
    ) as output:
        if not output.state.finished:
            _copy(parts, output, split, chunk_tokens=chunk_tokens)
            manifest = _merged([part.manifest for part in parts], bin_sha256=output.bin_sha256(split))
            assert output.state.splits[split].num_tokens == manifest.num_tokens, (output.state.splits[split], manifest)
            output.finish({split: dump_manifest(manifest)})
        output.publish()
    published = read_manifest(output_prefix)
    assert published is not None
    return published


def _parts(prefixes: Sequence[str]) -> list[_Part]:
    """The shards in order. Raises `DataError` unless they are all shards of one source, each once."""
    parts = sorted((_part(prefix) for prefix in prefixes), key=lambda part: part.index)
    first = parts[0]
    for part in parts[1:]:
        for name, words in _COMMON.items():
            ours, theirs = getattr(first.manifest, name), getattr(part.manifest, name)
            if ours != theirs:
                raise DataError(
                    found=f"{part.prefix} with another {words} than {first.prefix}: {theirs!r}, not {ours!r}",
                    required="shards of one run: the same inputs, tokenizer and options",
                    remedy="leave out what does not belong, or make the shards again with one command",
                )
    if first.manifest.order != "parts":
        raise DataError(
            found=f"{first.prefix}, which holds every {first.count}th block of an input of unknown size",
            required="shards that follow each other",
            remedy="name all shards in data.train; or read the data set from files",
        )
    _check_numbers(parts)
    _check_sources(parts)
    return parts


def _part(prefix: str) -> _Part:
    prefix = prefix.removesuffix(".json")
    manifest = read_manifest(prefix)
    if manifest is None:
        raise DataError(
            found=f"no manifest {prefix}.json",
            required="shards that tools/preprocess.py --shard wrote, with their manifests",
            remedy="check the prefix (it has no suffix but, if you like, .json)",
        )
    if not Path(prefix + ".idx").is_file():
        raise DataError(found=f"no file {prefix}.idx", required="a whole token file", remedy="run its shard again")
    index, _, count = manifest.shard.partition("/")
    return _Part(prefix=prefix, manifest=manifest, index=int(index), count=int(count))


def _check_numbers(parts: Sequence[_Part]) -> None:
    counts = sorted({part.count for part in parts})
    found = [part.index for part in parts]
    wanted = list(range(counts[0]))
    if len(counts) == 1 and found == wanted:
        return
    missing = sorted(set(wanted) - set(found))
    twice = sorted({index for index in found if found.count(index) > 1})
    problems = [
        f"shards of {' and of '.join(map(str, counts))}" if len(counts) > 1 else "",
        f"no shard {', '.join(map(str, missing))} of {counts[0]}" if missing else "",
        f"shard {', '.join(map(str, twice))} more than once" if twice else "",
    ]
    raise DataError(
        found="; ".join(problem for problem in problems if problem),
        required="each shard of one source once",
        remedy="name all of them; make missing ones with --shard I/N",
    )


def _check_sources(parts: Sequence[_Part]) -> None:
    """Inputs of which two shards read a part must have been the same, and no input between them may be unread."""
    for before, after in pairwise(parts):
        sources, end = before.manifest.sources, before.manifest.first_source + len(before.manifest.sources)
        begin = after.manifest.first_source
        common = sources[begin - before.manifest.first_source :] if begin < end else []
        again = after.manifest.sources[: len(common)]
        differing = [str(one["name"]) for one, other in zip(common, again) if _content(one) != _content(other)]
        if begin > end or differing:
            raise DataError(
                found=f"between {before.prefix} and {after.prefix}: "
                + (f"{', '.join(differing)} changed" if differing else f"inputs {end} to {begin - 1} missing"),
                required="shards of the same inputs",
                remedy="make the shards again",
            )


def _content(source: dict[str, Any]) -> tuple[Any, Any]:
    return source["num_bytes"], source["sha256"]


def _copy(parts: Sequence[_Part], output: PartialOutput, split: Split, *, chunk_tokens: int) -> None:
    state = output.state
    for nth in range(state.input, len(parts)):
        done = state.block if nth == state.input else 0
        for number, chunk in enumerate(islice(_chunks(parts[nth], chunk_tokens), done, None), start=done):
            output.append({split: chunk})
            state.input, state.block = nth, number + 1
            output.save()


def _chunks(part: _Part, chunk_tokens: int) -> Iterator[SplitTokens]:
    """Runs of whole documents of a shard, views of its files."""
    file = TokenFile(part.prefix)
    marks = TokenFile(loss_prefix(part.prefix)) if part.manifest.loss == "assistant" else None
    for begin, end in file.runs(chunk_tokens):
        tokens_N = file.tokens(begin, end)
        yield SplitTokens(
            tokens_N=tokens_N,
            lengths_U=file.lengths(begin, end).astype(np.int32),
            loss_N=None if marks is None else marks.tokens(begin, end).astype(np.uint8),
            max_token_id=int(tokens_N.max()),
        )


def _merged(manifests: Sequence[Manifest], *, bin_sha256: str) -> Manifest:
    """The manifest that a single run over the source writes."""
    skipped_counts: dict[str, int] = {}
    sources: list[dict[str, Any]] = []
    for manifest in manifests:
        sources += manifest.sources[len(sources) - manifest.first_source :]
        for kind, count in manifest.skipped_counts.items():
            skipped_counts[kind] = skipped_counts.get(kind, 0) + count
    return dataclasses.replace(
        manifests[0],
        num_documents=sum(manifest.num_documents for manifest in manifests),
        num_tokens=sum(manifest.num_tokens for manifest in manifests),
        skipped_counts=dict(sorted(skipped_counts.items())),
        skipped=[name for manifest in manifests for name in manifest.skipped][:MAX_SKIPPED_NAMES],
        max_token_id=max(manifest.max_token_id for manifest in manifests),
        num_without_targets=sum(manifest.num_without_targets for manifest in manifests),
        shard="0/1",
        block_bytes=0,
        bin_sha256=bin_sha256,
        sources=sources,
    )
