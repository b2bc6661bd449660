"""Inputs of text: lines of .jsonl files, plain or compressed, and the files of folders.

No tokens here. `zstandard` lives in `compressed.py`.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dmtd.data.corpora.compressed import COMPRESSIONS, ByteStream, DamagedFileError
from megatron_dmtd.data.corpora.documents import BadDocument, RecordKeys, text_document
from megatron_dmtd.data.corpora.formats import UTF8_MARK, format_of, other_encoding
from megatron_dmtd.data.corpora.inputs import BLOCK_DOCUMENTS, Block, EntriesBlock, Entry, StreamInput, file_identity
from megatron_dmtd.errors import DataError
from megatron_dmtd.infra.digests import sha256_of_text

#: the name of the input that every machine with Python has
STDLIB = "stdlib"


def lines_of(data: bytes, *, first_line: int) -> Iterator[tuple[int, bytes]]:
    """Numbered lines, without the blank ones."""
    for number, line in enumerate(data.split(b"\n"), start=first_line):
        if line and not line.isspace():
            yield number, line


@dataclass(frozen=True, kw_only=True, slots=True)
class LinesBlock:
    """Whole lines of a .jsonl file. Their documents are named `file:line`, counted from 1."""

    path: Path
    keys: RecordKeys
    first_line: int
    num_bytes: int
    """On disk; approximate for compressed files."""
    data: bytes | None = None
    """The lines of a compressed file. None: they are read from the file, as follows."""
    offset: int = 0
    """Where the lines of a plain file start; `num_bytes` is their length."""

    def entries(self) -> Iterator[Entry]:
        """Parse each line in turn."""
        data = self.data
        if data is None:
            with self.path.open("rb") as stream:
                stream.seek(self.offset)
                data = stream.read(self.num_bytes)
        for number, line in lines_of(data, first_line=self.first_line):
            yield self.keys.parse(line, name=f"{self.path.name}:{number}", where=f"line {number} of {self.path}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FilesBlock:
    """Text files, one document each."""

    files: tuple[tuple[str, str, bytes], ...]
    """Name, path and content."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(len(content) for _, _, content in self.files)

    def entries(self) -> Iterator[Entry]:
        """Decode each file, with its line ends untouched, but for a byte order mark. Raises `DataError` if one is compressed."""
        for name, path, content in self.files:
            # a text may well begin with `PAR1` or `BZh`, which are letters
            if (suffix := format_of(content)) and not _is_plain(content):
                raise DataError(
                    found=f"{path}, which holds the format of {suffix} files",
                    required="a folder of text files",
                    remedy="correct --pattern, or unpack the file",
                )
            try:
                text = content.removeprefix(UTF8_MARK).decode("utf-8")
            except UnicodeDecodeError as error:
                line = content.count(b"\n", 0, error.start) + 1
                found = f"line {line} of {path}: {other_encoding(content) or error}"
                yield BadDocument(name=name, kind="not UTF-8", found=found, required="text files in UTF-8")
            else:
                yield text_document(text, name=name, where=path)


def _is_plain(content: bytes) -> bool:
    try:
        return "\0" not in content.decode("utf-8")
    except UnicodeDecodeError:
        return False


class LinesInput(StreamInput):
    """A .jsonl file, plain or compressed."""

    def blocks(self, block_bytes: int) -> Iterator[Block]:
        """Runs of whole lines. A truncated compressed file yields all its whole lines, then the damage.

        Raises `DataError` if the damage leaves no line: a whole file is not one bad document.
        """
        stream = self._stream = ByteStream(self._path, read_bytes=block_bytes)
        pending: list[bytes] = []
        size, offset, first_line, disk_bytes = 0, 0, 1, 0
        damage = ""
        chunks = iter(stream)
        while True:
            try:
                chunk = next(chunks, None)
            except DamagedFileError as error:
                chunk, damage = None, str(error)
            if chunk is not None:
                pending.append(chunk)
                size += len(chunk)
                if size < block_bytes or b"\n" not in chunk:
                    continue
            data = b"".join(pending)
            # The last line of a whole file needs no line end; a line that is cut off by damage is lost.
            end = len(data) if chunk is None and not damage else data.rfind(b"\n") + 1
            lines, rest = data[:end], data[end:]
            if lines:
                yield self._block(lines, offset=offset, first_line=first_line, disk_bytes=stream.bytes_read - disk_bytes)
                disk_bytes = stream.bytes_read
                offset, first_line = offset + len(lines), first_line + lines.count(b"\n")
            if chunk is None:
                break
            pending, size = [rest] if rest else [], len(rest)
        if damage:
            found = f"line {first_line} of {self._path}: {damage}"
            if offset == 0:
                raise DataError(found=found, required="a whole file", remedy="make or copy the file again")
            name = f"{self._path.name}:{first_line}"
            yield EntriesBlock(documents=(BadDocument(name=name, kind="damaged file", found=found, required="a whole file"),))

    def _block(self, lines: bytes, *, offset: int, first_line: int, disk_bytes: int) -> LinesBlock:
        if self._path.suffix in COMPRESSIONS:
            return LinesBlock(path=self._path, keys=self._keys, first_line=first_line, num_bytes=disk_bytes, data=lines)
        return LinesBlock(path=self._path, keys=self._keys, first_line=first_line, num_bytes=len(lines), offset=offset)


class FolderInput:
    """Text files under one folder, one document each, named by their path from the folder."""

    remark = ""

    def __init__(self, root: Path, paths: Sequence[Path], *, name: str, description: str) -> None:
        self.name = name
        self.description = description
        self._files = sorted((path.relative_to(root).as_posix(), path) for path in paths)
        self.num_bytes = sum(path.stat().st_size for path in paths)
        self._digest = hashlib.sha256()

    @property
    def names(self) -> list[str]:
        """Names of all files in order."""
        return [name for name, _ in self._files]

    def identity(self) -> str:
        """Names, sizes and times of change of all files."""
        return sha256_of_text("".join(file_identity(path) for _, path in self._files))

    @property
    def sha256(self) -> str:
        """Digest of `sha256  name` lines, in the order of the names: what `sha256sum` of all files gives, digested again."""
        return self._digest.hexdigest()

    def blocks(self, block_bytes: int) -> Iterator[Block]:
        """Runs of files."""
        self._digest = hashlib.sha256()
        files: list[tuple[str, str, bytes]] = []
        size = 0
        for name, path in self._files:
            content = path.read_bytes()
            self._digest.update(f"{hashlib.sha256(content).hexdigest()}  {name}\n".encode(errors="surrogateescape"))
            files.append((name, str(path), content))
            size += len(content)
            if size >= block_bytes or len(files) >= BLOCK_DOCUMENTS:
                yield FilesBlock(files=tuple(files))
                files, size = [], 0
        if files:
            yield FilesBlock(files=tuple(files))


def folder_input(folder: Path, *, patterns: Sequence[str]) -> FolderInput:
    """The files of `folder` that match a glob pattern. Raises `DataError` if there is none."""
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    if not paths:
        raise DataError(
            found=f"no file in {folder} that matches {' or '.join(patterns)}",
            required="at least one text file",
            remedy="check the folder and --pattern (**/*.txt also searches its subfolders)",
        )
    return FolderInput(folder, list(paths), name=str(folder), description=f"{' and '.join(patterns)} in {folder.name}")


def stdlib_input() -> FolderInput:
    """The standard library of the Python that runs this: real text on any machine, about 30 MB.

    All .py files that hold text: a few are empty, or test Python's handling of encodings and are not UTF-8.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    installed = {"site-packages", "dist-packages"}
    paths = [
        path
        for path in root.rglob("*.py")
        if path.is_file() and installed.isdisjoint(path.relative_to(root).parts) and _holds_text(path)
    ]
    return FolderInput(root, paths, name=STDLIB, description=f"standard library of Python {sysconfig.get_python_version()}")


def _holds_text(path: Path) -> bool:
    try:
        return bool(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError:
        return False
