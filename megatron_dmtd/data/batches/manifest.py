"""The manifest `PREFIX.json` of a token file: what made it and what it contains.

Corpora made by other tools have none. It is never needed to read the tokens.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dmtd.errors import DataError, Refusal
from megatron_dmtd.infra.json_files import read_object

_NO_MANIFEST = Refusal(
    DataError,
    required="a manifest as tools/preprocess.py writes it",
    remedy="run tools/preprocess.py again, or delete the file: the tokens can be read without it",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Counts and provenance of one token file."""

    num_documents: int
    """Documents in the file."""
    num_tokens: int
    """Tokens in the file, each document's EOS included."""
    skipped_counts: dict[str, int] = field(default_factory=dict)
    """Documents of the whole source that were left out (`--skip-bad`), by what is wrong with them."""
    skipped: list[str] = field(default_factory=list)
    """Names of the first of these."""
    dtype: str
    """NumPy type of one token."""
    max_token_id: int
    """The highest id in the file."""
    vocab_size: int
    """Ids of the tokenizer: the highest one plus 1."""
    eos_token_id: int
    """Appended to each text, and nowhere else in the file. A chat holds it where its template writes it."""
    add_bos: str = "no"
    """`yes`: each document begins with `bos_token_id`. `no`: with its text. `template`: a chat's template decides. Files of
    versions that did not write this have no BOS."""
    bos_token_id: int | None = None
    """None unless `add_bos` is `yes`."""
    num_without_targets: int = 0
    """Documents of which no token is a target; only in files with loss marks."""
    pad_token_id: int
    """Id for padding. Not in the file, unless it is EOS."""
    mask_token_id: int
    """The id that no text of this file holds."""
    tokenizer_sha256: str
    """Digest of the tokenizer's `tokenizer.json`."""
    source: str
    """The source, in words."""
    split: str
    """`all`, `train` or `heldout`."""
    heldout_fraction: float
    """Share of the source's documents in the held-out split."""
    shard: str = "0/1"
    """`i/n`: the i-th of n parts of the source, which other runs share."""
    order: str = "parts"
    """`parts`: the shards one after the other are what a single run writes. `blocks`: each holds every n-th block."""
    source_sha256: str = ""
    """Digest of the names and sizes of all inputs; equal in all shards of a source."""
    block_bytes: int = 0
    """Size of the blocks between which inputs are cut into shards. 0: none is cut."""
    loss: str = "all"
    """`all`: every token is a target. `assistant`: those that the token file `PREFIX.loss` marks, a byte, 1 or 0, per token."""
    bin_sha256: str = ""
    """Digest of the .bin file."""
    first_source: int = 0
    """Number of the first of `sources` among all inputs, from 0."""
    sources: list[dict[str, Any]] = field(default_factory=list)
    """Each input that was read: its `name`, `num_bytes` and `sha256`, as `sha256sum` gives it for a file. A `remark`
    says which bytes after the end of its compressed streams were left out."""


def manifest_path(prefix: str) -> Path:
    """Where the manifest of the token file `prefix` lies."""
    return Path(prefix + ".json")


def loss_prefix(prefix: str) -> str:
    """The token file of the loss marks of `prefix`, where its manifest says that there is one."""
    return prefix + ".loss"


def dump_manifest(manifest: Manifest) -> str:
    """The manifest as JSON text."""
    return json.dumps(dataclasses.asdict(manifest), indent=2) + "\n"


def read_manifest(prefix: str) -> Manifest | None:
    """The manifest of a token file; None if it has none. Raises `DataError` if it is damaged."""
    path = manifest_path(prefix)
    if not path.is_file():
        return None
    fields = read_object(path, _NO_MANIFEST)
    try:
        return Manifest(**fields)
    except TypeError as error:
        raise _NO_MANIFEST(f"{path}: {error}") from error
