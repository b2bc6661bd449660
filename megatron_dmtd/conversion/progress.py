"""How far a conversion has come, on terminals."""

from __future__ import annotations

from collections.abc import Iterable

from tqdm import tqdm

from megatron_dmtd.weights.specs import TensorSpec, num_bytes_of

#: seconds of work after which a terminal is shown how far it has come
_PATIENCE_S = 2.0


def byte_bar(work: str, num_bytes: int) -> tqdm:
    """A bar over bytes, for a `with` block. None is drawn where no terminal would redraw it, or for what ends at once."""
    return tqdm(desc=work, total=num_bytes, unit="B", unit_scale=True, delay=_PATIENCE_S, disable=None)


def tensor_bar(work: str, specs: Iterable[TensorSpec]) -> tqdm:
    """The same over the bytes of tensors."""
    return byte_bar(work, sum(map(num_bytes_of, specs)))
