"""Arrays that are built once, kept on disk and memory-mapped: plans of epochs, which grow with the corpus.

An entry is a folder that is renamed into place whole, so it is there completely or not at all. Processes that want the same entry
wait for the one that builds it; where locks do not reach (nodes without a common disk, file systems without locks) each builds
its own, and since an entry depends on nothing but its key, it does not matter whose is kept.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_dmtd.errors import DataError

Arrays = Mapping[str, npt.NDArray[np.integer]]


def cached(
    folder: Path, key: Mapping[str, Any], build: Callable[[], tuple[Arrays, dict[str, int]]]
) -> tuple[Arrays, dict[str, int]]:
    """The arrays and numbers that `build` gives for `key`, from `folder`; the arrays stay on disk.

    Raises `DataError` if the folder cannot be written, or an entry is damaged.
    """
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:40]
    entry = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # whatever stands in its way
        raise _refusal(folder, error) from error
    if (entry / "meta.json").is_file():
        return _load(entry)
    try:
        with _locked(folder / f"{name}.lock"):
            if not (entry / "meta.json").is_file():
                _store(folder, entry, key, *build())
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPERM, errno.ENOTDIR):
            raise
        raise _refusal(folder, error) from error
    return _load(entry)


def _refusal(folder: Path, error: OSError) -> DataError:
    return DataError(
        found=f"{folder}: {error.strerror}",
        required="a folder that can hold the index of the corpus, 24 bytes per document and epoch",
        remedy="make room, or name another folder with data.cache_dir",
    )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One builder at a time, on file systems that have locks. A lock ends with its process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # Without locks each process builds its own, and the first to be renamed is kept.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _store(folder: Path, entry: Path, key: Mapping[str, Any], arrays: Arrays, numbers: dict[str, int]) -> None:
    partial = folder / f"{entry.name}.partial-{uuid.uuid4().hex}"
    partial.mkdir()
    try:
        for name, array in arrays.items():
            with (partial / f"{name}.npy").open("wb") as stream:
                np.save(stream, array)
                stream.flush()
                os.fsync(stream.fileno())
        sizes = {name: (partial / f"{name}.npy").stat().st_size for name in arrays}
        meta = json.dumps({"key": key, "numbers": numbers, "sizes": sizes}, indent=1)
        (partial / "meta.json").write_text(meta, encoding="utf-8")
        os.rename(partial, entry)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another process was faster: its entry is the same
            raise


def _load(entry: Path) -> tuple[Arrays, dict[str, int]]:
    try:
        meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
        wrong = [name for name, size in meta["sizes"].items() if (entry / f"{name}.npy").stat().st_size != size]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} of another size than was written")
        arrays = {name: np.load(entry / f"{name}.npy", mmap_mode="r") for name in meta["sizes"]}
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            found=f"{entry}: {error}", required="an index as it was written", remedy="delete the folder: it is built again"
        ) from error
    return arrays, meta["numbers"]
