"""Inspection of a finished token file: whether it is what its manifest says, and the text of its documents.

Shape legend: N tokens of a chunk or a document, Z documents of a chunk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_dmtd.cycle import is_cycle_head
from megatron_dmtd.data.batches.manifest import Manifest, loss_prefix, read_manifest
from megatron_dmtd.data.batches.token_file import TokenFile
from megatron_dmtd.data.corpora.token_texts import token_texts
from megatron_dmtd.data.corpora.tokenizer import load_tokenizer, tokenizer_sha256
from megatron_dmtd.errors import DataError

_REMEDY = "make the files again with tools/preprocess.py"
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """Counts of a valid token file."""

    num_documents: int
    num_tokens: int
    shortest: int
    """Tokens of the shortest document."""
    longest: int
    """Tokens of the longest document."""
    dtype: str
    manifest: Manifest | None
    """None: only the format could be checked."""


def verify(prefix: str, *, tokenizer_dir: str | None = None) -> Verified:
    """Read all of `prefix` and compare it with its manifest, and with a tokenizer. Raises `DataError` at the first fault."""
    file = TokenFile(prefix)
    file.check_index()
    manifest = read_manifest(prefix)
    if tokenizer_dir is not None:
        check_tokenizer(prefix, tokenizer_dir)
    lowest, highest, sha256 = _scan(file, None if manifest is None else manifest.mask_token_id)
    if lowest < 0:
        raise DataError(found=f"token id {lowest} in {prefix}.bin", required="ids from 0", remedy=_REMEDY)
    shortest, longest = _check_documents(file, manifest)
    if manifest is not None:
        _compare(
            prefix,
            {
                "documents": (len(file), manifest.num_documents),
                "tokens": (file.num_tokens, manifest.num_tokens),
                "type": (np.dtype(file.dtype).name, manifest.dtype),
                "highest id": (highest, manifest.max_token_id),
                "sha256 of the tokens": (sha256, manifest.bin_sha256 or sha256),
            },
        )
        if manifest.loss == "assistant":
            _check_loss(file)
    return Verified(
        num_documents=len(file),
        num_tokens=file.num_tokens,
        shortest=shortest,
        longest=longest,
        dtype=np.dtype(file.dtype).name,
        manifest=manifest,
    )


def check_tokenizer(prefix: str, tokenizer_dir: str) -> None:
    """Raise `DataError` if the manifest of `prefix` names another tokenizer. Without a manifest this cannot be checked."""
    manifest = read_manifest(prefix)
    if manifest is None:
        return
    found = tokenizer_sha256(tokenizer_dir)
    if found != manifest.tokenizer_sha256:
        raise DataError(
            found=f"{tokenizer_dir}/tokenizer.json with the sha256 {found[:16]}...",
            required=f"the tokenizer that made {prefix}: {manifest.tokenizer_sha256[:16]}...",
            remedy="name the tokenizer of the corpus, or tokenise the corpus again with this one",
        )


def check_one_tokenizer(prefixes: Sequence[str]) -> None:
    """Raise `DataError` if the manifests of token files name different tokenizers. Those without a manifest are not compared."""
    made_by: dict[str, str] = {}
    for prefix in prefixes:
        manifest = read_manifest(prefix)
        if manifest is not None and manifest.tokenizer_sha256:
            made_by.setdefault(manifest.tokenizer_sha256, prefix)
    if len(made_by) > 1:
        raise DataError(
            found=", ".join(f"{prefix} of the tokenizer {sha256[:16]}..." for sha256, prefix in made_by.items()),
            required="token files of one tokenizer: the same id means the same token in all of them",
            remedy="tokenise them again with one, or leave some out",
        )


def _scan(file: TokenFile, mask_token_id: int | None) -> tuple[int, int, str]:
    """Lowest id, highest id and digest of all tokens."""
    digest = hashlib.sha256()
    lowest, highest = 0, 0
    for tokens_N in file.chunks(_CHUNK):
        digest.update(tokens_N.data)
        lowest, highest = min(lowest, int(tokens_N.min())), max(highest, int(tokens_N.max()))
        if mask_token_id is not None and bool((tokens_N == mask_token_id).any()):
            raise DataError(found=f"the MASK id {mask_token_id} in {file.prefix}.bin", required="text without it", remedy=_REMEDY)
    return lowest, highest, digest.hexdigest()


def _check_documents(file: TokenFile, manifest: Manifest | None) -> tuple[int, int]:
    """Lengths of the shortest and the longest document."""
    shortest, longest = 2**62, 0
    for begin in range(0, len(file), _CHUNK):
        lengths_Z = file.lengths(begin, min(begin + _CHUNK, len(file)))
        shortest, longest = min(shortest, int(lengths_Z.min())), max(longest, int(lengths_Z.max()))
    if manifest is not None and shortest == 0:
        raise DataError(found=f"an empty document in {file.prefix}", required="documents with tokens", remedy=_REMEDY)
    return shortest, longest


def _compare(prefix: str, counts: dict[str, tuple[object, object]]) -> None:
    for name, (found, required) in counts.items():
        if found != required:
            raise DataError(found=f"{prefix}: {name} {found}", required=f"{required}, as its manifest says", remedy=_REMEDY)


def _check_loss(file: TokenFile) -> None:
    marks = TokenFile(loss_prefix(file.prefix))
    marks.check_index()
    _compare(marks.prefix, {"documents": (len(marks), len(file)), "tokens": (marks.num_tokens, file.num_tokens)})
    for begin in range(0, len(file), _CHUNK):
        end = min(begin + _CHUNK, len(file))
        if not np.array_equal(marks.lengths(begin, end), file.lengths(begin, end)):
            raise DataError(found=f"{marks.prefix}: other documents", required=f"those of {file.prefix}", remedy=_REMEDY)
    if any(int(marks_N.max()) > 1 for marks_N in marks.chunks(_CHUNK)):
        raise DataError(found=f"{marks.prefix}: marks above 1", required="0 or 1 per token", remedy=_REMEDY)


def inspect(prefix: str, documents: range, *, tokenizer_dir: str, cycle_length: int, color: bool) -> Iterator[str]:
    """Each document as text, with `|` where a cycle begins, showing which tokens carry loss.

    The first token is not a target, since nothing precedes it. Tokens that are not targets are in `[` `]`, or grey with `color`.
    Raises `DataError` if a document does not exist, or the tokenizer is not that of the corpus.
    """
    check_tokenizer(prefix, tokenizer_dir)
    file = TokenFile(prefix)
    if not 0 <= documents.start < len(file):
        raise DataError(
            found=f"document {documents.start} of {prefix}", required=f"0 to {len(file) - 1}", remedy="ask for one of these"
        )
    tokenizer = load_tokenizer(tokenizer_dir)
    manifest = read_manifest(prefix)
    marks = TokenFile(loss_prefix(prefix)) if manifest is not None and manifest.loss == "assistant" else None
    for document in range(documents.start, min(documents.stop, len(file))):
        num_tokens = int(file.lengths(document, document + 1)[0])
        ids_N = file.read(document, 0, num_tokens)
        target_N = np.ones(num_tokens, bool) if marks is None else marks.read(document, 0, num_tokens) == 1
        target_N[:1] = False
        texts = token_texts(tokenizer, ids_N.tolist())
        yield f"document {document}: {num_tokens} tokens, {int(target_N.sum())} targets"
        yield _marked(texts, target_N, cycle_length=cycle_length, color=color)


def _marked(texts: list[str], target_N: npt.NDArray[np.bool_], *, cycle_length: int, color: bool) -> str:
    parts: list[str] = []
    for position, (text, is_target) in enumerate(zip(texts, target_N.tolist())):
        if is_cycle_head(position, cycle_length):
            parts.append("\x1b[33m|\x1b[0m" if color else "|")
        if is_target:
            parts.append(text)
        else:
            parts.append(f"\x1b[90m{text}\x1b[0m" if color else f"[{text}]")
    return "".join(parts)
