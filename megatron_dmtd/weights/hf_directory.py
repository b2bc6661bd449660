"""The weights of a Hugging Face directory, with every tensor accounted for; used by converter, engine and live streams.
Two kinds of tensors may be stored besides those of the decoder, if their numbers are right: the head of a tied model, which must
be its embedding table, and rotary frequencies that older writers saved, which must be those of the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from megatron_dmtd.architecture import DecoderSpec
from megatron_dmtd.architecture.rotary import inverse_frequencies
from megatron_dmtd.errors import ConversionError
from megatron_dmtd.families import hf_tensors, read_directory
from megatron_dmtd.weights.megatron_names import check_hf, check_tied_head
from megatron_dmtd.weights.safetensors_files import WeightFiles
from megatron_dmtd.weights.specs import TensorSpec

_FREQUENCIES = ".rotary_emb.inv_freq"
#: of fp32 powers, computed by whatever wrote the file
_FREQUENCY_TOLERANCE = 1e-5


class HFWeights:
    """The tensors of a decoder in a directory. Opening reads headers, and of tensors only those that must be compared."""

    def __init__(self, directory: str | Path, decoder: DecoderSpec, *, any_type: bool = False) -> None:
        """Raises `ConversionError` if a file is missing or cut, or the tensors are not exactly those of `decoder`.

        `any_type`: see `check_hf`.
        """
        self.files = WeightFiles(directory)
        frequencies = [name for name in self.files.specs if name.endswith(_FREQUENCIES)]
        _check_frequencies(decoder, {name: self.files.read(name) for name in frequencies})
        self.stored: Mapping[str, TensorSpec] = {name: spec for name, spec in self.files.specs.items() if name not in frequencies}
        """Shape and type of each tensor, a tied model's second head included."""
        check_hf(decoder, self.stored, any_type=any_type)
        check_tied_head(decoder, self.stored, self.files.are_equal)
        self.names: tuple[str, ...] = tuple(hf_tensors(decoder))
        """The decoder's tensors, in the order of its layers."""

    def read(self, name: str) -> torch.Tensor:
        """One tensor, as it is stored."""
        return self.files.read(name)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the decoder by its name, one at a time."""
        for name in self.names:
            yield name, self.read(name)


def open_directory(directory: str | Path) -> HFWeights:
    """The weights of a directory by its own `config.json`, of any type. Raises as `families.read_directory` and `HFWeights`."""
    return HFWeights(directory, read_directory(directory).decoder, any_type=True)


def _check_frequencies(decoder: DecoderSpec, stored: Mapping[str, torch.Tensor]) -> None:
    """Raise `ConversionError` unless stored rotary frequencies are those of a profile of the decoder."""
    expected = [inverse_frequencies(profile, head_dim) for profile, head_dim in decoder.rotary_profiles]
    for name, found_F in stored.items():
        is_known = any(
            found_F.shape == own_F.shape and torch.allclose(found_F.float(), own_F, rtol=_FREQUENCY_TOLERANCE, atol=0)
            for own_F in expected
        )
        if not is_known:
            raise ConversionError(
                found=f"{name} with frequencies that are not those of the configuration ({found_F.flatten()[:4].tolist()}, ...)",
                required="the frequencies that rope_theta and the rope scaling give",
                remedy="correct the rotary settings of config.json, or remove the tensor if it is a leftover",
            )
