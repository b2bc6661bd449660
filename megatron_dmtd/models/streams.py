"""The streams of one microbatch, as they pass through Megatron's layers.

Megatron's hidden states are [s, b, h]. Real and shadow streams stand side by side along b: rows 0 to B-1 are real, rows B to
2B-1 are shadow. So each weight is read once for both, every token-wise module and every kind of sequence splitting works
unchanged, and s is N in every layer; only attention tells the streams apart.

Shape legend: B rows, N slots per row, R rotary width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_dmtd.attention import AttentionBackend


@dataclass(kw_only=True, slots=True)
class Streams:
    """What attention must know of one microbatch.

    It travels in the argument that Megatron calls `packed_seq_params`: the only one that reaches the attention core untouched
    through every kind of recompute. Made anew for every forward pass, never kept on a module: pipeline schedules and recompute
    hold several microbatches at once.
    """

    backend: AttentionBackend
    angles_NB1R: torch.Tensor
    """Rotary angles per slot of one stream."""
    num_streams: int
    """Streams in the parallel layers of this model: 2 for Refresh, else 1."""
    qkv_format: str = "sbhd"
    """Megatron reads this to tell packed layouts (`thd`) from rows."""

    def rotary(self, layer_kind: str) -> Any:
        """The rotary angles of a layer's queries and keys, in Megatron's form."""
        one = self.angles_NB1R
        if layer_kind == "sequential" or self.num_streams == 1:
            return one
        both = torch.cat((one, one), dim=1)
        return (one, both) if layer_kind == "last_parallel" else both
