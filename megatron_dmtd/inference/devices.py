"""Types and devices by their names."""

from __future__ import annotations

import torch

from megatron_dmtd.errors import CapabilityError, ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def dtype_of(name: str) -> torch.dtype:
    """The type of weights, activations and caches. Raises `ConfigError` for an unknown name."""
    if name not in DTYPES:
        raise ConfigError(found=f"dtype {name!r}", required=f"one of {sorted(DTYPES)}", remedy="change dtype")
    return DTYPES[name]


def matrix_dtype_of(name: str | None, dtype: str) -> torch.dtype | None:
    """The type of matrices and embeddings where it differs from `dtype`. Raises `ConfigError` for other mixtures."""
    if name is None or name == dtype:
        return None
    if (name, dtype) != ("bfloat16", "float32"):
        raise ConfigError(
            found=f"matrix_dtype {name!r} with dtype {dtype!r}",
            required="bfloat16 with float32, or the same type",
            remedy="leave matrix_dtype out",
        )
    return torch.bfloat16


def device_of(name: str | None) -> torch.device:
    """The device of that name; without one, the accelerator if there is one, else the CPU. Raises `CapabilityError`."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name is None:
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    count = torch.accelerator.device_count() if accelerator else 0
    is_here = device is not None and accelerator is not None and device.type == accelerator.type and (device.index or 0) < count
    if device is None or not (is_here or device.type == "cpu"):
        raise CapabilityError(
            found=f"device {name!r}, and {f'{count} of {accelerator.type}' if accelerator else 'no accelerator'} here",
            required="a device of this machine",
            remedy="use device='cpu'",
        )
    return device
