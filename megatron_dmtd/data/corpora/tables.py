"""Inputs with columns: parquet and Arrow files, and whatever the `datasets` library loads or streams.

`pyarrow` and `datasets` are imported when such an input is opened; no other module uses `datasets`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from megatron_dmtd.data.corpora.arrow_files import SUFFIXES as ARROW_SUFFIXES
from megatron_dmtd.data.corpora.arrow_files import ArrowFile, check_stream_end
from megatron_dmtd.data.corpora.columns import Fault, values_of
from megatron_dmtd.data.corpora.documents import BadDocument, RecordKeys
from megatron_dmtd.data.corpora.inputs import BLOCK_DOCUMENTS, Block, Entry, FileInput
from megatron_dmtd.errors import DataError
from megatron_dmtd.infra.digests import sha256_of_file

_ROWS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsBlock:
    """Records of a table, named `table:row`, counted from 1."""

    table: str
    """Name of the table in the names of its documents."""
    where: str
    """Name of the table in messages."""
    first_row: int
    keys: RecordKeys
    values: tuple[dict[str, Any], ...]
    """The fields that matter, of each record."""
    num_bytes: int

    def entries(self) -> Iterator[Entry]:
        """The document of each record."""
        for row, record in enumerate(self.values, start=self.first_row):
            name, where = f"{self.table}:{row}", f"row {row} of {self.where}"
            yield self._unreadable(record, name=name, where=where) or self.keys.document(record, name=name, where=where)

    def _unreadable(self, record: dict[str, Any], *, name: str, where: str) -> BadDocument | None:
        for column, value in record.items():
            if isinstance(value, Fault):
                found = f"{where}, column {column!r}: {value.reason}"
                if value.is_encoding:
                    return BadDocument(name=name, kind="not UTF-8", found=found, required="UTF-8")
                return BadDocument(name=name, kind="unreadable value", found=found, required=self.keys.required)
        return None


def _weight(record: dict[str, Any]) -> int:
    """Approximate bytes of a record."""
    return sum(len(value) if isinstance(value, str | bytes) else len(json.dumps(value, default=str)) for value in record.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Open:
    """An open file of columns."""

    names: list[str]
    num_rows: int | None
    """None: known only at its end."""
    batches: Iterator[Any]


@contextlib.contextmanager
def _parquet(path: Path, keys: RecordKeys) -> Iterator[_Open]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        columns = [name for name in keys.columns if name in names]
        yield _Open(names=names, num_rows=file.metadata.num_rows, batches=file.iter_batches(batch_size=_ROWS, columns=columns))


@contextlib.contextmanager
def _arrow(path: Path, keys: RecordKeys) -> Iterator[_Open]:
    with ArrowFile(path, keys.columns) as file:
        slices = (batch.slice(first, _ROWS) for batch in file.batches() for first in range(0, batch.num_rows, _ROWS))
        yield _Open(names=file.names, num_rows=None, batches=slices)


class TableInput(FileInput):
    """A file of columns, parquet or Arrow's own. It is decoded in this process and tokenised in others, a few rows at a time."""

    remark = ""

    def __init__(self, path: Path, keys: RecordKeys) -> None:
        super().__init__(path, keys)
        self._sha256 = ""
        self._is_arrow = path.suffix in ARROW_SUFFIXES
        self._open = functools.partial(_arrow if self._is_arrow else _parquet, path, keys)
        self._kind = f"{'an Arrow' if self._is_arrow else 'a parquet'} file"
        with self._refusing(lambda: str(path)), self._open() as file:
            names = file.names
            rows = sum(batch.num_rows for batch in file.batches) if file.num_rows is None else file.num_rows
        self._bytes_per_row = self.num_bytes / max(rows, 1)
        if names.count(keys.key) != 1:
            raise DataError(
                found=f"{path} with the columns {names}",
                required=f"{self._kind} with one column {keys.key!r}",
                remedy="name another with --text-key or --messages-key",
            )

    @contextlib.contextmanager
    def _refusing(self, where: Callable[[], str]) -> Iterator[None]:
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowException, OSError) as error:
            required, remedy = f"{self._kind}, whole", "make or copy the file again"
            raise DataError(found=f"{where()}: {error}", required=required, remedy=remedy) from error

    @property
    def sha256(self) -> str:
        """Digest of the file on disk, as `sha256sum` gives it."""
        return self._sha256

    def blocks(self, block_bytes: int) -> Iterator[Block]:
        """Runs of rows. Raises `DataError` where the file is damaged: what follows cannot be read."""
        row = 1
        with self._refusing(lambda: f"row {row} of {self._path}, or a later one"), self._open() as file:
            columns = [name for name in self._keys.columns if name in file.names]
            for values in _runs((record for batch in file.batches for record in _rows(batch, columns)), block_bytes):
                yield RowsBlock(
                    table=self._path.name,
                    where=str(self._path),
                    first_row=row,
                    keys=self._keys,
                    values=values,
                    num_bytes=round(self._bytes_per_row * len(values)),
                )
                row += len(values)
        self._sha256 = sha256_of_file(self._path)


def _rows(batch: Any, columns: list[str]) -> Iterator[dict[str, Any]]:
    for row in zip(*(values_of(batch.column(name)) for name in columns)):
        yield dict(zip(columns, row))


def _runs(values: Iterator[dict[str, Any]], block_bytes: int) -> Iterator[tuple[dict[str, Any], ...]]:
    run: list[dict[str, Any]] = []
    size = 0
    for value in values:
        run.append(value)
        size += _weight(value)
        if size >= block_bytes or len(run) >= BLOCK_DOCUMENTS:
            yield tuple(run)
            run, size = [], 0
    if run:
        yield tuple(run)


#: advice
_NAMED = "faults of .jsonl, .parquet and .arrow files are named if they are read without hf:, and can be left out (--skip-bad)"
_DATASET_OPTIONS = ("name", "split", "streaming", "data_files", "data_dir", "revision")


class DatasetInput:
    """A data set of the `datasets` library: a name of the hub, a local folder or script, or what `save_to_disk` wrote.

    Written `NAME?split=train&streaming=1`, with any of the options name, split, streaming, data_files, data_dir and revision of
    `datasets.load_dataset`. A streamed data set is not downloaded whole; both kinds are read a few records at a time.
    """

    remark = ""

    def __init__(self, name: str, keys: RecordKeys) -> None:
        path, _, query = name.partition("?")
        options: dict[str, Any] = dict(parse_qsl(query))
        unknown = sorted(set(options) - set(_DATASET_OPTIONS))
        if unknown:
            raise DataError(
                found=f"the options {unknown} of hf:{name}", required=f"some of {_DATASET_OPTIONS}", remedy="correct the options"
            )
        options["streaming"] = options.get("streaming", "0") in ("1", "true", "True")
        self.name = f"hf:{name}"
        self.num_bytes = 0
        self._keys, self._path = keys, path
        self._dataset, split = self._load(path, {"split": "train", **options})
        self.description = f"{keys.description} of {split} of {path}"
        self._digest = hashlib.sha256()
        columns = self._dataset.column_names
        if columns is not None and keys.key not in columns:
            raise self._no_column(columns)

    def _no_column(self, columns: list[str]) -> DataError:
        return DataError(
            found=f"{self.name} with the columns {columns}",
            required=f"a column {self._keys.key!r}",
            remedy="name another with --text-key or --messages-key",
        )

    def _load(self, path: str, options: dict[str, Any]) -> tuple[Any, str]:
        import datasets

        try:
            if (Path(path) / "dataset_info.json").is_file() or (Path(path) / "dataset_dict.json").is_file():
                for file in sorted(Path(path).glob("**/*.arrow")):
                    check_stream_end(file)  # `datasets` takes a truncated one for a shorter one
                loaded = datasets.load_from_disk(path)
                return (loaded[options["split"]] if isinstance(loaded, dict) else loaded), options["split"]
            return datasets.load_dataset(path, **options), options["split"]
        except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
            reasons = [f"{type(one).__name__}: {one}" for one in (error, error.__cause__) if one is not None]
            raise DataError(
                found=f"{self.name}: {'; '.join(reasons)}",
                required="a data set that datasets.load_dataset or load_from_disk opens",
                remedy=f"check the name and its options (hf:NAME?name=CONFIG&split=SPLIT); {_NAMED}",
            ) from error

    def identity(self) -> str:
        """The name, and the fingerprint of a data set that is not streamed."""
        return f"{self.name} {getattr(self._dataset, '_fingerprint', '')}"

    @property
    def sha256(self) -> str:
        """Digest of all records that were read, as JSON lines."""
        return self._digest.hexdigest()

    def blocks(self, block_bytes: int) -> Iterator[Block]:
        """Runs of records."""
        self._digest = hashlib.sha256()
        row = 1
        for values in _runs(self._values(), block_bytes):
            num_bytes = sum(map(_weight, values))
            yield RowsBlock(
                table=Path(self._path).name, where=self.name, first_row=row, keys=self._keys, values=values, num_bytes=num_bytes
            )
            row += len(values)

    def _values(self) -> Iterator[dict[str, Any]]:
        import datasets
        import pyarrow

        try:
            for batch in self._dataset.with_format("arrow").iter(batch_size=_ROWS):
                if self._keys.key not in batch.column_names:
                    raise self._no_column(sorted(batch.column_names))  # streamed data sets may not know their columns before
                columns = [name for name in self._keys.columns if name in batch.column_names]
                for record in _rows(batch, columns):
                    self._digest.update(json.dumps(record[self._keys.key], default=str).encode() + b"\n")
                    yield record
        except (OSError, ValueError, datasets.exceptions.DatasetsError, pyarrow.ArrowException) as error:
            raise DataError(
                found=f"{self.name}: {type(error).__name__}: {error}",
                required="a data set that can be read to its end",
                remedy=f"correct its files; {_NAMED}",
            ) from error
