"""The share of the machines' peak that a run's arithmetic reaches (MFU). What counts as work is `architecture.flops`."""

from __future__ import annotations

from megatron_dmtd.errors import ConfigError


def mfu(*, flops: float, seconds: float, num_devices: int, peak_tflops: float) -> float:
    """Fraction, 0 to 1, of the peak of `num_devices` devices that `flops` in `seconds` amount to.

    `flops` is the work of all devices together; `peak_tflops` is the peak of one, in 1e12 operations per second, in the type of
    the matrix products and without sparsity. Raises `ConfigError` if there is no peak to compare with.
    """
    if peak_tflops <= 0:
        raise ConfigError(
            found=f"logging.peak_tflops = {peak_tflops}",
            required="the peak of one device in TFLOP/s",
            remedy="set logging.peak_tflops, or do not ask for MFU",
        )
    return flops / (seconds * num_devices * peak_tflops * 1e12)
