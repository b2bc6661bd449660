"""Values of Arrow columns as the JSON that was put into them.

Arrow gives every object of a column all fields of all objects, and those that an object did not have are null. So nulls in
objects are left out: whoever needs one in the arguments of a call writes them as JSON, in a text or in a column of the type
`arrow.json` (`Json` of `datasets`), where nothing is added and nothing left out. Nulls in lists are kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Reader = Callable[[Any], Any]


def values_of(column: Any) -> list[Any]:
    """The values of an Arrow array, in plain Python."""
    values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    reader = reader_of(column.type)
    return values if reader is None else [reader(value) for value in values]


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
    nested = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    if any(is_kind(kind) for is_kind in nested):
        return _of_list(reader_of(kind.value_type))
    return None


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
