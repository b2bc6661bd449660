"""The files of an unfinished run: `PREFIX.partial/`, from which the same command continues after an interruption.

Tokens are appended; every few seconds they are flushed to disk, and a small state file records how much of the input they cover.
An interrupted run truncates its files to the last recorded state and continues from there. At the end the files get their names,
the index last, since tokens without an index are not a token file: nothing that looks finished is ever incomplete. Memory does
not grow with the corpus: document lengths go to disk too, and the index is streamed from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_dmtd.data.batches.manifest import loss_prefix, manifest_path
from megatron_dmtd.data.batches.token_file import token_file_paths, write_index
from megatron_dmtd.data.corpora.documents import BadDocument, Split
from megatron_dmtd.data.corpora.encoding import SplitTokens
from megatron_dmtd.errors import DataError, Refusal
from megatron_dmtd.infra.disk import FULL, disk_errors
from megatron_dmtd.infra.files import flush, write_atomically
from megatron_dmtd.infra.json_files import read_object
from megatron_dmtd.infra.locks import FileLock

#: maximum number of recorded names of documents left out; all are counted
MAX_SKIPPED_NAMES = 1000
_READ_BYTES = 1 << 20
_NO_ROOM = Refusal(
    DataError,
    required="room for the token files",
    remedy="make room and run the same command again: it continues where it stopped",
)
_NO_FOLDER = Refusal(DataError, required="a folder that can be written to", remedy="name another output")
_DAMAGED_STATE = Refusal(
    DataError, required="the state of an unfinished run, as it was written", remedy="remove the folder, and run the command again"
)


@dataclass(kw_only=True, slots=True)
class SplitCounts:
    """What one token file contains so far."""

    num_documents: int = 0
    num_tokens: int = 0
    max_token_id: int = 0
    num_without_targets: int = 0


@dataclass(kw_only=True, slots=True)
class RunState:
    """How far a run has come. Everything before (`input`, `block`) is on disk."""

    header: dict[str, Any]
    """Inputs and options that determine the result: only a run with the same ones continues from here."""
    input: int = 0
    """Inputs that are done."""
    block: int = 0
    """Blocks of the next input that are done."""
    splits: dict[str, SplitCounts] = field(default_factory=dict)
    skipped_counts: dict[str, int] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    sources: list[dict[str, Any]] = field(default_factory=list)
    """Name, size and checksum of each input that is done."""
    finished: bool = False
    """Whether everything is written and only the renaming remains."""

    def skip(self, bad: Sequence[BadDocument]) -> None:
        """Count documents that were left out."""
        for one in bad:
            self.skipped_counts[one.kind] = self.skipped_counts.get(one.kind, 0) + 1
        self.skipped += [one.name for one in bad[: MAX_SKIPPED_NAMES - len(self.skipped)]]


def _load_state(path: Path) -> RunState | None:
    if not path.is_file():
        return None
    values = read_object(path, _DAMAGED_STATE)
    try:
        splits = {split: SplitCounts(**counts) for split, counts in values.pop("splits").items()}
        return RunState(**values, splits=splits)
    except (KeyError, TypeError, AttributeError) as error:
        raise _DAMAGED_STATE(f"{path}: {error}") from error


def _writing_to(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Refuses a disk that cannot take more."""
    return disk_errors(_NO_ROOM, found=f"writing to {folder}", only=FULL)


class _Appended:
    """A file that is appended to and can be truncated."""

    def __init__(self, path: Path, size: int, *, digested: bool) -> None:
        self.path = path
        self._digest = hashlib.sha256() if digested else None
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._fd, size)
        if self._digest is not None:
            while chunk := os.read(self._fd, _READ_BYTES):
                self._digest.update(chunk)
        os.lseek(self._fd, size, os.SEEK_SET)

    def append(self, array: npt.NDArray[Any]) -> None:
        data = np.ascontiguousarray(array).data.cast("B")
        if self._digest is not None:
            self._digest.update(data)
        while data:
            data = data[os.write(self._fd, data) :]

    @property
    def sha256(self) -> str:
        assert self._digest is not None
        return self._digest.hexdigest()

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class _SplitFiles:
    """Tokens, document lengths and, where asked for, loss marks of one token file."""

    def __init__(self, folder: Path, split: Split, counts: SplitCounts, *, dtype: type[np.integer], with_loss: bool) -> None:
        self.counts = counts
        self.dtype = dtype
        itemsize = np.dtype(dtype).itemsize
        self.tokens = _Appended(folder / f"{split}.bin", counts.num_tokens * itemsize, digested=True)
        self.lengths = _Appended(folder / f"{split}.lengths", counts.num_documents * 4, digested=False)
        self.loss = _Appended(folder / f"{split}.loss.bin", counts.num_tokens, digested=False) if with_loss else None

    @property
    def files(self) -> list[_Appended]:
        return [file for file in (self.tokens, self.lengths, self.loss) if file is not None]

    def append(self, part: SplitTokens) -> None:
        self.tokens.append(part.tokens_N)
        self.lengths.append(part.lengths_U)
        if self.loss is not None:
            assert part.loss_N is not None and part.loss_N.size == part.tokens_N.size
            self.loss.append(part.loss_N)
        self.counts.num_documents += part.lengths_U.size
        self.counts.num_tokens += part.tokens_N.size
        self.counts.max_token_id = max(self.counts.max_token_id, part.max_token_id)
        self.counts.num_without_targets += part.num_without_targets


def partial_folder(output_prefix: str) -> Path:
    """Where an unfinished run with this output lives."""
    return Path(output_prefix + ".partial")


class PartialOutput:
    """The unfinished files of one run, held under a lock."""

    def __init__(
        self,
        output_prefix: str,
        outputs: dict[Split, str],
        *,
        header: dict[str, Any],
        dtype: type[np.integer],
        with_loss: bool,
        overwrite: bool,
        save_seconds: float,
    ) -> None:
        """Begin a run, or continue one that has the same `header`.

        Raises `DataError` if another process is using it, an unfinished run has another header and `overwrite` is not given, or
        nothing can be written there.
        """
        self.folder = partial_folder(output_prefix)
        self.outputs = outputs
        self._save_seconds = save_seconds
        self._saved_at = time.monotonic()
        self._lock = _lock(_made(self.folder, output_prefix))
        self._splits: dict[Split, _SplitFiles] = {}
        try:
            self.state = self._open_state(header, overwrite=overwrite)
            self.resumed = self.has_progress
            if not self.state.finished:
                for split in outputs:
                    counts = self.state.splits.setdefault(split, SplitCounts())
                    self._splits[split] = _SplitFiles(self.folder, split, counts, dtype=dtype, with_loss=with_loss)
        except BaseException:
            self._lock.close()
            raise

    @staticmethod
    def is_publishing(output_prefix: str, header: dict[str, Any]) -> bool:
        """Whether a run with this `header` was interrupted while it renamed its files."""
        state = _load_state(partial_folder(output_prefix) / "state.json")
        return state is not None and state.finished and state.header == json.loads(json.dumps(header))

    def _open_state(self, header: dict[str, Any], *, overwrite: bool) -> RunState:
        state = _load_state(self.folder / "state.json")
        header = json.loads(json.dumps(header))
        if state is not None and state.header != header:
            if not overwrite:
                changed = [key for key in header | state.header if state.header.get(key) != header.get(key)]
                raise DataError(
                    found=f"{self.folder}, an unfinished run with another {' and another '.join(changed)}",
                    required="the same inputs and options, to continue it",
                    remedy="repeat its command, or pass --overwrite to discard it",
                )
            (self.folder / "state.json").unlink()
            state = None
        return RunState(header=header) if state is None else state

    @property
    def has_progress(self) -> bool:
        """Whether some of the input is done."""
        return (self.state.input, self.state.block) != (0, 0)

    def __enter__(self) -> PartialOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Keep the folder if a later run can resume from it; a run that has saved nothing leaves nothing."""
        for split in self._splits.values():
            for file in split.files:
                file.close()
        if not (self.folder / "state.json").exists():
            self.discard()
        self._lock.close()

    def discard(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def append(self, parts: dict[Split, SplitTokens]) -> None:
        """Add the tokens of one block to the files."""
        with _writing_to(self.folder):
            for split, part in parts.items():
                self._splits[split].append(part)

    def save(self, *, now: bool = False) -> None:
        """Make the current end of the files the point to resume from, if the last such point is old enough."""
        if not now and time.monotonic() - self._saved_at < self._save_seconds:
            return
        with _writing_to(self.folder):
            for split in self._splits.values():
                for file in split.files:
                    file.sync()
            write_atomically(self.folder / "state.json", json.dumps(asdict(self.state)))
        self._saved_at = time.monotonic()

    def bin_sha256(self, split: Split) -> str:
        """Digest of the tokens of a split."""
        return self._splits[split].tokens.sha256

    def finish(self, manifests: dict[Split, str]) -> None:
        """Write indices and manifests, and record that only the renaming is left."""
        with _writing_to(self.folder):
            for split, files in self._splits.items():
                lengths = self.folder / f"{split}.lengths"
                write_index(self.folder / f"{split}.idx", lengths, dtype=files.dtype)
                if files.loss is not None:
                    write_index(self.folder / f"{split}.loss.idx", lengths, dtype=np.uint8)
                (self.folder / f"{split}.json").write_text(manifests[split], encoding="utf-8")
            for path in self.folder.iterdir():
                flush(path)
        self.state.finished = True
        self.save(now=True)

    def publish(self) -> None:
        """Rename the files. Repeated after an interruption, it continues with those not yet renamed."""
        for split, prefix in self.outputs.items():
            renames = _renames(self.folder, split, prefix)
            index_source, index_path = renames[-1]
            if index_source.exists():
                index_path.unlink(missing_ok=True)  # the old index must never describe the new tokens
            for source, target in renames:
                if source.exists():
                    os.replace(source, target)
        self.discard()


def _renames(folder: Path, split: Split, prefix: str) -> list[tuple[Path, Path]]:
    """Source and target of all files of a token file: its index is the last."""
    bin_path, index_path = token_file_paths(prefix)
    loss_bin, loss_index = token_file_paths(loss_prefix(prefix))
    return [
        (folder / f"{split}.bin", bin_path),
        (folder / f"{split}.loss.bin", loss_bin),
        (folder / f"{split}.loss.idx", loss_index),
        (folder / f"{split}.json", manifest_path(prefix)),
        (folder / f"{split}.idx", index_path),
    ]


def final_paths(outputs: dict[Split, str]) -> list[Path]:
    """All files that a run may leave."""
    return [target for split, prefix in outputs.items() for _, target in _renames(Path(), split, prefix)]


def _made(folder: Path, output_prefix: str) -> Path:
    """The folder of an unfinished run, created if necessary."""
    if output_prefix.endswith(("/", os.sep)) or not output_prefix:
        raise DataError(
            found=f"the output {output_prefix!r}",
            required="a folder and what the names of the files start with",
            remedy=f"write for example {output_prefix}corpus",
        )
    with disk_errors(_NO_FOLDER, found=str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lock").touch()
    return folder


def _lock(folder: Path) -> FileLock:
    """Lock the folder against other processes; the lock ends with the process."""
    lock = FileLock(folder / "lock")
    if not lock.try_acquire():
        lock.close()
        raise DataError(
            found=f"{folder}, which another process is using",
            required="one process per output",
            remedy="wait for it, or name another output",
        )
    return lock
