"""Where raw documents come from, and which of them are held out.

A source can be iterated any number of times and yields the same documents in the same order on every machine. It knows nothing of
tokens. A document that is not valid text is left out by name, in `skipped`: counted, never silent. What is wrong with the source
as a whole, such as a line of a .jsonl file that is not JSON, is a `DataError`.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from megatron_dmtd.errors import DataError

Split = Literal["all", "train", "heldout"]

#: the name of the source that any machine with Python has
STDLIB = "stdlib"


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text and its name, which decides its split."""

    name: str
    text: str


class DocumentSource(Protocol):
    """Documents in a fixed order."""

    description: str
    """The source in words, for the manifest."""

    @property
    def skipped(self) -> list[str]:
        """Names of the documents that the last pass left out, because they are not text."""
        ...

    def __iter__(self) -> Iterator[Document]:
        """A pass over all documents."""
        ...


class FileDocuments:
    """Text files under one folder, one document each, named by their path from the folder."""

    def __init__(self, root: Path, paths: Sequence[Path], *, description: str) -> None:
        self.description = description
        self.skipped: list[str] = []
        self._paths = sorted((path.relative_to(root).as_posix(), path) for path in paths)

    @property
    def names(self) -> list[str]:
        """Names of all files in order, those that are not text included."""
        return [name for name, _ in self._paths]

    def __iter__(self) -> Iterator[Document]:
        """Read each file in turn, as UTF-8 and with its line ends untouched."""
        self.skipped = []
        for name, path in self._paths:
            try:
                text = path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                self.skipped.append(name)
                continue
            yield Document(name=name, text=text)


class JsonlDocuments:
    """Lines of .jsonl files: one JSON object each, with the text under one key. Named `file:line`, counted from 1."""

    def __init__(self, paths: Sequence[Path], *, text_key: str) -> None:
        self.description = f"key {text_key!r} of " + ", ".join(path.name for path in paths)
        self.skipped: list[str] = []
        self._paths = list(paths)
        self._text_key = text_key

    def __iter__(self) -> Iterator[Document]:
        """Read each line in turn. Raises `DataError` at a line that is no object with the text."""
        self.skipped = []
        for path in self._paths:
            with path.open("rb") as stream:
                for number, line in enumerate(stream, start=1):
                    if not line.strip():
                        continue
                    name = f"{path.name}:{number}"
                    text = self._text(line, where=f"line {number} of {path}")
                    if is_text(text):
                        yield Document(name=name, text=text)
                    else:
                        self.skipped.append(name)

    def _text(self, line: bytes, *, where: str) -> str:
        remedy = "correct the line, or name another key with --text-key"
        required = f"one JSON object per line, with a string under {self._text_key!r}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(found=f"{where}: {error}", required=required, remedy=remedy) from error
        text = record.get(self._text_key) if isinstance(record, dict) else None
        if not isinstance(text, str):
            found = f"an object with the keys {sorted(record)}" if isinstance(record, dict) else type(record).__name__
            raise DataError(found=f"{where}: {found}", required=required, remedy=remedy)
        return text


class ChainedDocuments:
    """Several sources, one after the other."""

    def __init__(self, sources: Sequence[DocumentSource]) -> None:
        self.description = "; ".join(source.description for source in sources)
        self._sources = list(sources)

    @property
    def skipped(self) -> list[str]:
        """Names of the documents that the last pass left out, because they are not text."""
        return [name for source in self._sources for name in source.skipped]

    def __iter__(self) -> Iterator[Document]:
        """All documents of the first source, then of the second, and so on."""
        for source in self._sources:
            yield from source


def is_text(text: str) -> bool:
    """Whether `text` can be written as UTF-8. JSON can hold halves of surrogate pairs, which no tokenizer accepts."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def folder_documents(folder: Path, *, patterns: Sequence[str]) -> FileDocuments:
    """The files of `folder` that match a glob pattern. Raises `DataError` if there is none."""
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    if not paths:
        raise DataError(
            found=f"no file in {folder} that matches {' or '.join(patterns)}",
            required="at least one text file",
            remedy="check the folder and --pattern (**/*.txt also searches its subfolders)",
        )
    return FileDocuments(folder, list(paths), description=f"{' and '.join(patterns)} in {folder.name}")


def stdlib_documents() -> FileDocuments:
    """The .py files of the standard library of the Python that runs this: real text on any machine, about 30 MB."""
    root = Path(sysconfig.get_paths()["stdlib"])
    installed = {"site-packages", "dist-packages"}
    paths = [path for path in root.rglob("*.py") if path.is_file() and installed.isdisjoint(path.relative_to(root).parts)]
    version = sysconfig.get_python_version()
    return FileDocuments(root, paths, description=f"standard library of Python {version}")


def open_source(inputs: Sequence[str], *, patterns: Sequence[str] = ("**/*.txt",), text_key: str = "text") -> DocumentSource:
    """The documents of all `inputs`, in order: `stdlib`, a folder (its files that match `patterns`), or a .jsonl file.

    Raises `DataError` for an input that is none of these or holds nothing.
    """
    if not inputs:
        raise DataError(found="no input", required=f"{STDLIB}, a folder or a .jsonl file", remedy="name one")
    sources = [_open_one(name, patterns=patterns, text_key=text_key) for name in inputs]
    return sources[0] if len(sources) == 1 else ChainedDocuments(sources)


def _open_one(name: str, *, patterns: Sequence[str], text_key: str) -> DocumentSource:
    path = Path(name)
    if name == STDLIB:
        return stdlib_documents()
    if path.is_dir():
        return folder_documents(path, patterns=patterns)
    if path.is_file() and path.suffix == ".jsonl":
        if path.stat().st_size == 0:
            raise DataError(found=f"{path} is empty", required="at least one line", remedy="check how it was made")
        return JsonlDocuments([path], text_key=text_key)
    raise DataError(
        found=f"the file {name}" if path.exists() else f"no file or folder {name}",
        required=f"{STDLIB}, a folder of text files or a .jsonl file",
        remedy="correct the path, or put the texts into such a file",
    )


def check_fraction(heldout_fraction: float) -> None:
    """Raise `DataError` if this is no share of documents that leaves some for training."""
    if not 0 <= heldout_fraction < 1:
        raise DataError(
            found=f"a held-out fraction of {heldout_fraction}",
            required="at least 0 and less than 1",
            remedy="0.02 holds out one document in fifty",
        )


def is_heldout(name: str, fraction: float) -> bool:
    """Whether the document `name` is held out: a pure function of its name, the same on every machine and in every run.

    A larger `fraction` holds out a superset.
    """
    digest = hashlib.blake2b(name.encode("utf-8", errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def in_split(name: str, split: Split, fraction: float) -> bool:
    """Whether the document `name` belongs to `split`; `train` and `heldout` are disjoint and together all."""
    return split == "all" or (split == "heldout") == is_heldout(name, fraction)
