"""Progress of a conversion, on terminals."""

from __future__ import annotations

from collections.abc import Iterable

from tqdm import tqdm

from megatron_dmtd.weights.specs import TensorSpec

#: seconds of work after which progress is shown
_PATIENCE_S = 2.0


def byte_bar(work: str, num_bytes: int) -> tqdm:
    """A bar over bytes, for a `with` block. Not drawn without a terminal, or for work that ends at once."""
    return tqdm(desc=work, total=num_bytes, unit="B", unit_scale=True, delay=_PATIENCE_S, disable=None)


def tensor_bar(work: str, specs: Iterable[TensorSpec]) -> tqdm:
    """The same over the bytes of tensors."""
    return byte_bar(work, sum(spec.num_bytes for spec in specs))
