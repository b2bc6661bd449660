"""Opens inputs by the names that users give: folders, files, glob patterns, data sets of the hub."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_dmtd.data.corpora.arrow_files import SUFFIXES as ARROW_SUFFIXES
from megatron_dmtd.data.corpora.compressed import COMPRESSIONS
from megatron_dmtd.data.corpora.documents import BadDocument, Document, RecordKeys
from megatron_dmtd.data.corpora.formats import check_signature, layout_of
from megatron_dmtd.data.corpora.inputs import BLOCK_BYTES, Input
from megatron_dmtd.data.corpora.json_arrays import ArrayInput
from megatron_dmtd.data.corpora.tables import DatasetInput, TableInput
from megatron_dmtd.data.corpora.text_files import STDLIB, LinesInput, folder_input, stdlib_input
from megatron_dmtd.errors import DataError

#: what the name of an input of the `datasets` library starts with
HUB = "hf:"
_LINES_SUFFIXES = (".jsonl", ".ndjson", ".json")
_TABLE_SUFFIXES = (".parquet", *ARROW_SUFFIXES)
_REQUIRED = (
    f"{STDLIB}, a folder of text files, .jsonl or .json files (also with {', '.join(COMPRESSIONS)}), "
    f"{', '.join(_TABLE_SUFFIXES)} files, or {HUB}NAME of a data set"
)


def open_inputs(names: Sequence[str], *, patterns: Sequence[str] = ("**/*.txt",), keys: RecordKeys | None = None) -> list[Input]:
    """All inputs that `names` stand for, in order; the files of a glob pattern are sorted.

    A name is `stdlib`, a folder (its files that match `patterns`), a .jsonl, .json, .parquet, .arrow or .feather file (the first
    two also compressed), a glob pattern of such files, or `hf:` and what `datasets` loads.

    Raises:
        DataError: a name is none of these or holds nothing.
        CapabilityError: a package that reads it is missing.

    """
    keys = keys or RecordKeys()
    if not names:
        raise DataError(found="no input", required=_REQUIRED, remedy="name one")
    return [one for name in names for one in _open(name, patterns=patterns, keys=keys)]


def _open(name: str, *, patterns: Sequence[str], keys: RecordKeys) -> list[Input]:
    if name == STDLIB:
        return [stdlib_input()]
    if name.startswith(HUB):
        return [DatasetInput(name.removeprefix(HUB), keys)]
    path = Path(name)
    if path.is_dir():
        return [folder_input(path, patterns=patterns)]
    if not path.exists() and glob.has_magic(name):
        matches = sorted(match for match in glob.glob(name, recursive=True) if os.path.isfile(match))
        if not matches:
            raise DataError(found=f"no file that matches {name}", required=_REQUIRED, remedy="correct the pattern")
        return [_open_file(Path(match), keys=keys) for match in matches]
    if path.is_file():
        return [_open_file(path, keys=keys)]
    raise DataError(found=f"no file or folder {name}", required=_REQUIRED, remedy="correct the path")


def _open_file(path: Path, *, keys: RecordKeys) -> Input:
    bare = path.with_suffix("") if path.suffix in COMPRESSIONS else path
    if bare.suffix not in _LINES_SUFFIXES and path.suffix not in _TABLE_SUFFIXES:
        raise DataError(found=f"the file {path}", required=_REQUIRED, remedy="put the texts into such a file")
    if path.stat().st_size == 0:
        raise DataError(found=f"{path} is empty", required="at least one document", remedy="check how it was made")
    if path.suffix in _TABLE_SUFFIXES:
        check_signature(path)
        return TableInput(path, keys)
    return ArrayInput(path, keys) if layout_of(path) == "array" else LinesInput(path, keys)


class DocumentSource:
    """All documents of some inputs, one after the other, for readers that need no blocks."""

    def __init__(self, inputs: Sequence[Input], *, skip_bad: bool = False) -> None:
        self.inputs = list(inputs)
        self.skipped: list[BadDocument] = []
        """What the last pass left out."""
        self._skip_bad = skip_bad

    @property
    def description(self) -> str:
        """The inputs in words."""
        return "; ".join(one.description for one in self.inputs)

    def __iter__(self) -> Iterator[Document]:
        """Read all. Raises `DataError` at a document that cannot be used, unless it was asked to skip these."""
        self.skipped = []
        for one in self.inputs:
            for block in one.blocks(BLOCK_BYTES):
                for entry in block.entries():
                    if isinstance(entry, Document):
                        yield entry
                    elif self._skip_bad:
                        self.skipped.append(entry)
                    else:
                        raise entry.error()


def open_source(
    names: Sequence[str], *, patterns: Sequence[str] = ("**/*.txt",), keys: RecordKeys | None = None, skip_bad: bool = False
) -> DocumentSource:
    """The documents of `names`, as `open_inputs` reads them."""
    return DocumentSource(open_inputs(names, patterns=patterns, keys=keys), skip_bad=skip_bad)
