"""Inputs with columns: parquet files, and whatever the `datasets` library loads or streams.

The only module that uses `pyarrow` and `datasets`, which are imported when such an input is opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from megatron_dmtd.data.corpora.columns import Fault, values_of
from megatron_dmtd.data.corpora.documents import BadDocument, RecordKeys
from megatron_dmtd.data.corpora.inputs import BLOCK_DOCUMENTS, Block, Entry, file_identity
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
    """Of each record, the fields that matter."""
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


class ParquetInput:
    """A parquet file. It is decoded in this process and tokenised in others, a few rows at a time."""

    remark = ""

    def __init__(self, path: Path, keys: RecordKeys) -> None:
        import pyarrow.parquet

        self.name = str(path)
        self.description = f"{keys.description} of {path.name}"
        self.num_bytes = path.stat().st_size
        self._path, self._keys, self._sha256 = path, keys, ""
        required = f"a parquet file with a column {keys.key!r}"
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                columns, self._num_rows = file.schema_arrow.names, file.metadata.num_rows
        except pyarrow.ArrowException as error:
            raise DataError(found=f"{path}: {error}", required=required, remedy="make or copy the file again") from error
        if keys.key not in columns:
            remedy = "name another with --text-key or --messages-key"
            raise DataError(found=f"{path} with the columns {columns}", required=required, remedy=remedy)

    def identity(self) -> str:
        """Path, size and time of change."""
        return file_identity(self._path)

    @property
    def sha256(self) -> str:
        """Digest of the file on disk, as `sha256sum` gives it."""
        return self._sha256

    def blocks(self, block_bytes: int) -> Iterator[Block]:
        """Runs of rows. Raises `DataError` where the file is damaged: what follows cannot be read."""
        import pyarrow.parquet

        row = 1
        bytes_per_row = self.num_bytes / max(self._num_rows, 1)
        try:
            with pyarrow.parquet.ParquetFile(self._path) as file:
                for values in _runs(_records(file, self._keys), block_bytes):
                    yield RowsBlock(
                        table=self._path.name,
                        where=str(self._path),
                        first_row=row,
                        keys=self._keys,
                        values=values,
                        num_bytes=round(bytes_per_row * len(values)),
                    )
                    row += len(values)
        except (pyarrow.ArrowException, OSError) as error:
            found = f"row {row} of {self._path}, or a later one: {error}"
            raise DataError(found=found, required="a whole parquet file", remedy="make or copy the file again") from error
        self._sha256 = sha256_of_file(self._path)


def _records(file: Any, keys: RecordKeys) -> Iterator[dict[str, Any]]:
    columns = [name for name in keys.columns if name in file.schema_arrow.names]
    for batch in file.iter_batches(batch_size=_ROWS, columns=columns):
        yield from _rows(batch, columns)


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
                loaded = datasets.load_from_disk(path)
                return (loaded[options["split"]] if isinstance(loaded, dict) else loaded), options["split"]
            return datasets.load_dataset(path, **options), options["split"]
        except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
            raise DataError(
                found=f"{self.name}: {type(error).__name__}: {error}",
                required="a data set that datasets.load_dataset or load_from_disk opens",
                remedy="check the name and its options (hf:NAME?name=CONFIG&split=SPLIT)",
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
                remedy="correct its files; .jsonl files read without hf: are reported by line, and can be read with --skip-bad",
            ) from error
