"""Words for types and devices."""

import pytest
import torch

from megatron_dmtd.errors import CapabilityError, ConfigError
from megatron_dmtd.inference.devices import device_of, dtype_of, matrix_dtype_of


def test_types_have_torchs_names():
    assert [dtype_of(name) for name in ("float32", "bfloat16", "float64")] == [torch.float32, torch.bfloat16, torch.float64]
    with pytest.raises(ConfigError, match="dtype 'int4'"):
        dtype_of("int4")


def test_matrices_may_be_bfloat16_in_float32_alone():
    assert matrix_dtype_of(None, "float32") is None and matrix_dtype_of("bfloat16", "bfloat16") is None
    assert matrix_dtype_of("bfloat16", "float32") == torch.bfloat16
    with pytest.raises(ConfigError, match="matrix_dtype 'float32' with dtype 'bfloat16'"):
        matrix_dtype_of("float32", "bfloat16")


def test_a_device_is_one_of_this_machine():
    assert device_of("cpu") == torch.device("cpu")
    absent = "xpu" if torch.accelerator.is_available() else "cuda"
    for name in (absent, "toaster"):
        with pytest.raises(CapabilityError, match=f"device {name!r}, and"):
            device_of(name)
