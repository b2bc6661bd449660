"""Rotary angles of a microbatch's slots, for every rotary profile of a decoder.

Shape legend: B rows, N slots of a row, D head width, A = D / 2 frequencies.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_dmtd.architecture import RotaryProfile
from megatron_dmtd.architecture.rotary import inverse_frequencies
from megatron_dmtd.models.streams import Angles


class RotaryAngles:
    """The frequencies of some (profile, head width) pairs, in fp32."""

    def __init__(self, profiles: Iterable[tuple[RotaryProfile, int]]) -> None:
        self._frequencies_A = {(profile, width): inverse_frequencies(profile, width) for profile, width in profiles}

    def __call__(self, positions_BN: torch.Tensor) -> Angles:
        """The angles of slots at these positions, which restart with each document."""
        device = positions_BN.device
        self._frequencies_A = {key: inverse_A.to(device) for key, inverse_A in self._frequencies_A.items()}
        positions_NB11 = positions_BN.t()[:, :, None, None].to(torch.float32)
        return {key: (positions_NB11 * inverse_A).repeat(1, 1, 1, 2) for key, inverse_A in self._frequencies_A.items()}
