"""The streams of one microbatch, as they pass through Megatron's layers.

Megatron's hidden states are [s, b, h]: s slots (N, or this rank's share of them under sequence parallelism), b rows, h the hidden
size X. The streams of a visit are concatenated along b: with real and shadow, rows 0 to B-1 are real and rows B to 2B-1 are
shadow. So each weight is read once for both, every token-wise module and every kind of sequence splitting works unchanged, and s
does not depend on the visit; only attention distinguishes the streams.

Shape legend: B rows, N slots of a row, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_dmtd.architecture import AttentionSpec, RotaryProfile, Stream, Visit
from megatron_dmtd.attention import AttentionBackend

#: The rotary angle of each slot, [N, B, 1, D], for each profile and head width that occurs in the decoder.
Angles = Mapping[tuple[RotaryProfile, int], torch.Tensor]


def select_rows(x_sb: torch.Tensor, held: tuple[Stream, ...], wanted: tuple[Stream, ...]) -> torch.Tensor:
    """The rows of the `wanted` streams of a tensor [s, b, ...] whose rows are those of the `held` streams."""
    if wanted == held:
        return x_sb
    parts = dict(zip(held, x_sb.chunk(len(held), dim=1), strict=True))
    return parts[wanted[0]] if len(wanted) == 1 else torch.cat([parts[stream] for stream in wanted], dim=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class VisitStreams:
    """What a layer needs to know of one microbatch in one visit.

    It is passed in the argument that Megatron calls `packed_seq_params`: the only one that reaches the attention core unchanged
    under every kind of recompute.
    """

    backend: AttentionBackend
    angles: Angles
    streams: tuple[Stream, ...]
    """Streams that enter."""
    outputs: tuple[Stream, ...]
    """Streams that leave: the last of those that enter."""
    qkv_format: str = "sbhd"
    """Megatron reads this to tell packed layouts (`thd`) from rows."""

    def __post_init__(self) -> None:
        assert self.streams[len(self.ending) :] == self.outputs, (self.streams, self.outputs)

    @property
    def ending(self) -> tuple[Stream, ...]:
        """Streams that enter and do not leave: only this visit's keys and values of them are read."""
        return tuple(stream for stream in self.streams if stream not in self.outputs)

    def rotary_angles(self, attention: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Angles of a layer's queries and of its keys: one row for each row of the streams."""
        angles_NB1D = self.angles[attention.rotary, attention.head_dim]
        keys = _repeated(angles_NB1D, len(self.streams))
        return (_repeated(angles_NB1D, len(self.outputs)) if self.ending else keys), keys


def _repeated(angles_NB1D: torch.Tensor, times: int) -> torch.Tensor:
    return angles_NB1D if times == 1 else torch.cat((angles_NB1D,) * times, dim=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchStreams:
    """What attention needs to know of one microbatch.

    Made for each forward pass and never kept on a module: pipeline schedules and recompute hold several microbatches at once.
    """

    backend: AttentionBackend
    angles: Angles

    def at(self, visit: Visit) -> VisitStreams:
        """The same, as one visit sees it."""
        return VisitStreams(backend=self.backend, angles=self.angles, streams=visit.streams, outputs=visit.outputs)
