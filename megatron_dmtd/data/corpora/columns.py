"""Values of Arrow columns as the JSON that was put into them.

Arrow gives every object of a column all fields of all objects, and those that an object did not have are null. So nulls in
objects are left out: whoever needs one in the arguments of a call writes them as JSON, in a text or in a column of the type
`arrow.json` (`Json` of `datasets`), where nothing is added and nothing left out. Nulls in lists are kept. Bytes are text in
UTF-8: writers that do not know text as a type store it so.

A column stores its values without checking them: texts may hold any bytes, dates any year. A value that Python cannot hold is a
`Fault` of its row, and no reason to lose the rows around it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Reader = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Stands for a value that could not be read."""

    reason: str
    is_encoding: bool
    """Whether bytes that are not UTF-8 are the reason."""


def values_of(column: Any) -> list[Any]:
    """The values of an Arrow array, in plain Python, with a `Fault` for each that cannot be read."""
    import pyarrow

    reader = reader_of(column.type)
    # KeyError: a key twice in a map, an unknown time zone. ValueError, OverflowError: no UTF-8, dates that Python does not have.
    unreadable = (ValueError, OverflowError, KeyError, TypeError, pyarrow.ArrowException)
    try:
        values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
        return values if reader is None else [reader(value) for value in values]
    except unreadable:
        return [_value(column[row], reader, unreadable) for row in range(len(column))]


def _value(scalar: Any, reader: Reader | None, unreadable: tuple[type[Exception], ...]) -> Any:
    try:
        value = scalar.as_py(maps_as_pydicts="strict")
        return value if reader is None else reader(value)
    except unreadable as error:
        reason = str(error) if isinstance(error, UnicodeDecodeError) else f"a value of the type {scalar.type}: {error}"
        return Fault(reason=reason, is_encoding=isinstance(error, UnicodeDecodeError))


def reader_of(kind: Any) -> Reader | None:
    """What makes plain values of those that `pyarrow` gives for a type; None: they are plain already."""
    import pyarrow

    if isinstance(kind, pyarrow.JsonType):
        return _from_json
    if isinstance(kind, pyarrow.BaseExtensionType):
        return reader_of(kind.storage_type)
    types = pyarrow.types
    if types.is_dictionary(kind):
        return reader_of(kind.value_type)
    if types.is_struct(kind):
        return _of_struct({kind.field(nth).name: reader_of(kind.field(nth).type) for nth in range(kind.num_fields)})
    if types.is_map(kind):
        return _of_map(reader_of(kind.item_type))
    if any(
        is_kind(kind) for is_kind in (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    ):
        return _from_bytes
    nested = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    if any(is_kind(kind) for is_kind in nested):
        return _of_list(reader_of(kind.value_type))
    return None


def _from_bytes(value: Any) -> Any:
    return None if value is None else value.decode("utf-8")


def _from_json(value: Any) -> Any:
    if value is None:
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value  # whoever needs more than a text refuses it by name


def _of_struct(fields: dict[str, Reader | None]) -> Reader:
    def read(value: Any) -> Any:
        if value is None:
            return None
        plain = {name: item if (reader := fields.get(name)) is None else reader(item) for name, item in value.items()}
        return {name: item for name, item in plain.items() if item is not None}

    return read


def _of_map(reader: Reader | None) -> Reader | None:
    if reader is None:
        return None
    return lambda value: None if value is None else {name: reader(item) for name, item in value.items()}


def _of_list(reader: Reader | None) -> Reader | None:
    if reader is None:
        return None
    return lambda value: None if value is None else [reader(item) for item in value]
