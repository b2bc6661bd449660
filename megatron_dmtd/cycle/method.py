"""The method as one value: its variant, the length of its cycles, the id of MASK, and where it splits the layers.

Everything that depends on cycles takes this value: configuration, schedule, attention, data, engine and the conversion to and
from Hugging Face. Nothing else asks which variant it is; the properties below are all that the variants differ in.

Source: docs/method.md, sections 1 and 6 to 9.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dmtd.cycle.rule import (
    VANILLA,
    VARIANTS,
    complete_length,
    cycle_id,
    cycle_start,
    parallel_entries,
    phase,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A variant of Parallel DMTD, or vanilla: an ordinary decoder, which has no cycles and no parallel layers."""

    variant: str
    """One of the four variants, or "vanilla"."""
    cycle_length: int = 1
    """Tokens per cycle; 1 for vanilla."""
    mask_token_id: int = -1
    """The id that stands for a token not yet known; -1 for vanilla."""
    num_parallel_layers: int = 0
    """The first layers of the decoder, which run once per cycle; 0 for vanilla."""

    def __post_init__(self) -> None:
        assert self.variant == VANILLA or self.variant in VARIANTS, self.variant
        assert self.cycle_length >= 1, self.cycle_length
        is_whole = (self.cycle_length, self.num_parallel_layers) == (1, 0)
        assert is_whole if self.variant == VANILLA else self.num_parallel_layers >= 1, self

    @property
    def is_vanilla(self) -> bool:
        """Whether this is an ordinary decoder."""
        return self.variant == VANILLA

    @property
    def history(self) -> str:
        """`real` or `shadow`: what earlier cycles look like to a shadow query. `real` for vanilla, which has no shadow stream."""
        return "real" if self.is_vanilla else VARIANTS[self.variant][0]

    @property
    def block_attention(self) -> str:
        """`causal` or `bidirectional`: attention among the shadow slots of one cycle. `causal` for vanilla."""
        return "causal" if self.is_vanilla else VARIANTS[self.variant][1]

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams of the first layer, `real` or `shadow`, in the order in which they are concatenated. K and V of the first
        of them outlive the pass (docs/method.md, section 7); the last one leaves the parallel layers.
        """
        return ("real",) if self.is_vanilla else ("real", "shadow") if self.history == "real" else ("shadow",)

    @property
    def is_bidirectional(self) -> bool:
        """Whether the shadow slots of one cycle all see one another."""
        return self.block_attention == "bidirectional"

    @property
    def shadow_is_causal(self) -> bool:
        """Whether a shadow slot sees the shadow slots up to itself and nothing else: ordinary causal attention."""
        return self.streams == ("shadow",) and not self.is_bidirectional

    # Positions and cycles.

    def phase(self, position: int) -> int:
        """The index of `position` within its cycle."""
        return phase(position, self.cycle_length)

    def cycle_id(self, position: int) -> int:
        """The cycle that holds `position`."""
        return cycle_id(position, self.cycle_length)

    def cycle_start(self, position: int) -> int:
        """The head of the cycle that holds `position`."""
        return cycle_start(position, self.cycle_length)

    def complete_length(self, length: int) -> int:
        """`length` rounded up to whole cycles."""
        return complete_length(length, self.cycle_length)

    # Decoding: steps and what the caches hold after them.

    def needs_parallel(self, start: int, stop: int) -> bool:
        """Whether a step over tokens `[start, stop)` meets a cycle head, and so runs the parallel layers."""
        return self.num_parallel_layers > 0 and self.complete_length(start) < stop

    def refreshed(self, start: int, stop: int) -> range:
        """Positions of the real stream that a step over tokens `[start, stop)` computes in the parallel layers: of the cycles
        that have ended and are not stored yet; none if there is no such stream.
        """
        ended = self.cycle_start(stop - 1) if len(self.streams) > 1 else 0
        return range(self.parallel_entries(start), ended)

    def furthest_stop(self, start: int, limit: int) -> int:
        """Where a chunk from `start` may stop, at most `limit`: one that starts inside a cycle ends with it at the latest, since
        the kept hidden states that it reads must not be replaced in the same step.
        """
        cycle_end = self.complete_length(start)
        return limit if start == cycle_end else min(limit, cycle_end)

    def parallel_entries(self, num_tokens: int) -> int:
        """Entries in a parallel layer's cache for a request that has taken `num_tokens` tokens (docs/method.md, section 9)."""
        if self.is_vanilla:
            return 0
        return parallel_entries(num_tokens, cycle_length=self.cycle_length, history=self.history)


#: An ordinary decoder.
ORDINARY = Method(variant=VANILLA)
