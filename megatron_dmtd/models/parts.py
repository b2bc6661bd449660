"""The result of a part's builder: Megatron's module, and the settings of Megatron's configuration that this module reads.

Each kind of part has one builder, in the file of its name (`attention`, `mlp`, `norm`, `residual`); `layers` combines them. A new
kind of part is one more builder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of a layer, ready to be built."""

    spec: ModuleSpec | type
    settings: dict[str, Any]
    """Fields of TransformerConfig. They differ between layers if the decoder's layers do."""
