from __future__ import annotations

import functools

import pytest
import torch

from megatron_dmtd.attention import select_backend
from megatron_dmtd.errors import CapabilityError


def test_backends_are_chosen_by_device_and_refused_by_name() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    select = functools.partial(select_backend, head_dim=16)
    assert (select("auto", cpu), select("auto", cuda)) == ("dense", "flex")
    assert select("masked", cpu) == select("masked", cuda) == "masked"
    with pytest.raises(CapabilityError, match="attention_backend = flex on cpu"):
        select("flex", cpu)
    with pytest.raises(CapabilityError, match="attention_backend = dense on cuda"):
        select("dense", cuda)
    with pytest.raises(CapabilityError, match="no package transformer_engine and no CUDA device"):
        select("te", cpu)


@pytest.mark.parametrize("name", ["auto", "flex"])
def test_heads_too_narrow_for_the_kernels_of_a_gpu_are_refused(name: str) -> None:
    cuda = torch.device("cuda")
    with pytest.raises(CapabilityError, match="attention_backend = flex with a head width of 8"):
        select_backend(name, cuda, head_dim=8)
    assert select_backend("masked", cuda, head_dim=8) == "masked"
