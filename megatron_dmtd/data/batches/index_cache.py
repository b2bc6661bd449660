"""Arrays that are built once, kept on disk and memory-mapped: plans of epochs, which grow with the corpus.

An entry is a folder that is renamed into place, so it is complete or absent. Processes that need the same entry wait for the one
that builds it. Where locks do not work (nodes without a common disk, file systems without locks) each process builds its own;
since an entry depends only on its key, it does not matter which one is kept.
"""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_dmtd.errors import DataError, Refusal
from megatron_dmtd.infra.digests import sha256_of_text
from megatron_dmtd.infra.directories import built_aside
from megatron_dmtd.infra.disk import UNWRITABLE, disk_errors
from megatron_dmtd.infra.files import flush
from megatron_dmtd.infra.json_files import read_object
from megatron_dmtd.infra.locks import FileLock

Arrays = Mapping[str, npt.NDArray[np.integer]]
_NO_FOLDER = Refusal(
    DataError,
    required="a folder that can hold the index of the corpus, 24 bytes per document and epoch",
    remedy="make room, or name another folder with data.cache_dir",
)
_DAMAGED = Refusal(DataError, required="an index as it was written", remedy="delete the folder: it is built again")


def cached(
    folder: Path, key: Mapping[str, Any], build: Callable[[], tuple[Arrays, dict[str, int]]]
) -> tuple[Arrays, dict[str, int]]:
    """The arrays and numbers that `build` gives for `key`, from `folder`; the arrays stay on disk.

    Raises `DataError` if the folder cannot be written, or an entry is damaged.
    """
    name = sha256_of_text(json.dumps(key, sort_keys=True))[:40]
    entry = folder / name
    with disk_errors(_NO_FOLDER, found=str(folder)):  # whatever stands in its way
        folder.mkdir(parents=True, exist_ok=True)
    if (entry / "meta.json").is_file():
        return _load(entry)
    with disk_errors(_NO_FOLDER, found=str(folder), only=UNWRITABLE), FileLock(folder / f"{name}.lock") as lock:
        # Without locks each process builds its own, and the first to be renamed is kept.
        with contextlib.suppress(OSError):
            lock.acquire()
        if not (entry / "meta.json").is_file():
            _store(entry, key, *build())
    return _load(entry)


def _store(entry: Path, key: Mapping[str, Any], arrays: Arrays, numbers: dict[str, int]) -> None:
    try:
        with built_aside(entry) as aside:
            for name, array in arrays.items():
                np.save(aside / f"{name}.npy", array)
                flush(aside / f"{name}.npy")
            sizes = {name: (aside / f"{name}.npy").stat().st_size for name in arrays}
            meta = json.dumps({"key": key, "numbers": numbers, "sizes": sizes}, indent=1)
            (aside / "meta.json").write_text(meta, encoding="utf-8")
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another process was faster: its entry is the same
            raise


def _load(entry: Path) -> tuple[Arrays, dict[str, int]]:
    meta = read_object(entry / "meta.json", _DAMAGED)
    try:
        wrong = [name for name, size in meta["sizes"].items() if (entry / f"{name}.npy").stat().st_size != size]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} of another size than was written")
        arrays = {name: np.load(entry / f"{name}.npy", mmap_mode="r") for name in meta["sizes"]}
        return arrays, meta["numbers"]
    except (OSError, ValueError, KeyError) as error:
        raise _DAMAGED(f"{entry}: {error}") from error
