"""Rotary frequencies of a profile, and the angles of positions: one formula for training and decoding.

Frequencies of a scaled profile are computed in fp32, as transformers computes them, and equal transformers' bit for bit; those of
the default profile are computed in the requested type. Exported model code calls the functions of transformers instead.

Sources: RoPE, arXiv 2104.09864; YaRN, arXiv 2309.00071; `llama3`, the model card of Llama 3.1.

Shape legend: D head width, A = D / 2 frequencies.
"""

from __future__ import annotations

import math

import torch

from megatron_dmtd.architecture.spec import RopeScaling, RotaryProfile


def inverse_frequencies(
    profile: RotaryProfile, head_dim: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Radians per position of each pair of dimensions, `[A]` in `dtype` (fp32 or wider)."""
    scaling = profile.scaling
    own = dtype if scaling.rope_type == "default" else torch.float32
    exponent_A = torch.arange(0, head_dim, 2, dtype=torch.int64).to(own) / head_dim
    period_A = profile.theta**exponent_A
    if scaling.rope_type == "yarn":
        inverse_A = _yarn(period_A, scaling, theta=profile.theta, head_dim=head_dim)
    elif scaling.rope_type == "llama3":
        inverse_A = _llama3(1.0 / period_A, scaling)
    elif scaling.rope_type == "linear":
        inverse_A = 1.0 / period_A / scaling.factor
    else:
        assert scaling.rope_type == "default", scaling.rope_type
        inverse_A = 1.0 / period_A
    return inverse_A.to(device=device, dtype=dtype)


def attention_factor(scaling: RopeScaling) -> float:
    """Factor on cosines and sines of queries and of keys; its square scales the attention's scores."""
    if scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _concentration(scaling.factor, scaling.mscale) / _concentration(scaling.factor, scaling.mscale_all_dim)
    return _concentration(scaling.factor, 1.0)


def rotary_tables(
    position: torch.Tensor, profile: RotaryProfile, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `[..., D]` of integer positions `[...]`, computed in fp32 or wider and given in `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)
    inverse_A = inverse_frequencies(profile, head_dim, dtype=wide, device=position.device)
    angle = (position[..., None].to(wide) * inverse_A).repeat(*(1,) * position.dim(), 2)
    factor = attention_factor(profile.scaling)
    return (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)


def _concentration(factor: float, mscale: float) -> float:
    """YaRN's factor on scores, "m" of arXiv 2309.00071, section 3.4 (there the square root of 1/t)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(inverse_A: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long wavelengths are divided by `factor`, short ones are unchanged, and those in between are interpolated."""
    original = scaling.original_max_position_embeddings
    wavelength_A = 2 * math.pi / inverse_A
    longest, shortest = original / scaling.low_freq_factor, original / scaling.high_freq_factor
    kept_A = (original / wavelength_A - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    between_A = (1 - kept_A) * inverse_A / scaling.factor + kept_A * inverse_A
    scaled_A = torch.where(wavelength_A > longest, inverse_A / scaling.factor, inverse_A)
    return torch.where((wavelength_A >= shortest) & (wavelength_A <= longest), between_A, scaled_A)


def _yarn(period_A: torch.Tensor, scaling: RopeScaling, *, theta: float, head_dim: int) -> torch.Tensor:
    """Frequencies with few rotations over the original context are divided by `factor`, those with many are unchanged."""
    first, last = (
        _dimension_of(rotations, scaling.original_max_position_embeddings, theta=theta, head_dim=head_dim)
        for rotations in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    ramp_A = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    stays_A = 1 - ramp_A
    return 1.0 / (scaling.factor * period_A) * (1 - stays_A) + 1.0 / period_A * stays_A


def _dimension_of(rotations: float, context: int, *, theta: float, head_dim: int) -> float:
    """The pair of dimensions, as a real number, that makes this many rotations over `context` positions."""
    return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))
