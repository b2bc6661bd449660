from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

WriteTokens = Callable[..., str]


@pytest.fixture
def write_tokens(tmp_path: Path) -> WriteTokens:
    """Write documents of ids as Megatron's own builder does, and return the prefix."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    def write(documents: Sequence[Sequence[int]], *, name: str = "corpus", dtype=np.uint16) -> str:
        prefix = str(tmp_path / name)
        builder = IndexedDatasetBuilder(prefix + ".bin", dtype=dtype)
        for ids in documents:
            builder.add_document(np.array(ids), [len(ids)])
        builder.finalize(prefix + ".idx")
        return prefix

    return write
