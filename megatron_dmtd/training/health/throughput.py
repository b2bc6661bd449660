"""How fast a run is: tokens per second, and the share of the machine's peak (MFU), since the last log line.

The peak is given by the configuration or measured when the run starts. Evaluations and saves do not count.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from megatron_dmtd.architecture.flops import training_flops_per_token
from megatron_dmtd.config import Config
from megatron_dmtd.config.decoder import schedule_of
from megatron_dmtd.models.transformer_config import DTYPES
from megatron_dmtd.platform import Platform
from megatron_dmtd.platform.machine import peak_flops_per_s
from megatron_dmtd.training.flops import mfu
from megatron_dmtd.training.state import RunState


def measure_peak_tflops(platform: Platform, dtype: torch.dtype) -> float:
    """TFLOP/s that a rank could reach (`platform.machine`), mean over all ranks, which measure at the same time. Collective."""
    torch.distributed.barrier()
    peak = peak_flops_per_s(platform.device, dtype) / 1e12
    rate = torch.tensor([peak], dtype=torch.float64, device=platform.device)
    torch.distributed.all_reduce(rate)
    return float(rate) / torch.distributed.get_world_size()


def peak_tflops(config: Config, platform: Platform) -> float:
    """Peak of one device, of which MFU is the share, in TFLOP/s; 0 if it is neither given nor to be measured. Collective."""
    if not config.logging.measure_peak:
        return config.logging.peak_tflops
    return measure_peak_tflops(platform, DTYPES[config.training.precision])


class Throughput:
    """Throughput since the last `restart`."""

    def __init__(self, run: RunState, *, peak_tflops: float) -> None:
        """`peak_tflops`: the result of the function of this name."""
        config = run.config
        self._run, self._peak_tflops = run, peak_tflops
        schedule = schedule_of(config.model, config.cycle)
        self._flops_per_token = training_flops_per_token(schedule, document_length=config.data.seq_length)
        self.restart()

    def restart(self) -> None:
        """Forget all measurements so far."""
        self._num_steps, self._num_tokens, self._seconds = 0, 0, 0.0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Time one step."""
        num_tokens = self._run.batch_size * self._run.config.data.seq_length
        started = time.perf_counter()
        yield
        self._run.platform.synchronize()
        self._seconds += time.perf_counter() - started
        self._num_steps += 1
        self._num_tokens += num_tokens

    def values(self) -> dict[str, float]:
        """`step_time_s`, `tokens_per_s` (slots of the rows, of all ranks), `mfu` if there is a peak, `memory_gib`."""
        values = {"step_time_s": self._seconds / self._num_steps, "tokens_per_s": self._num_tokens / self._seconds}
        if self._peak_tflops > 0:
            values["mfu"] = mfu(
                flops=self._num_tokens * self._flops_per_token,
                seconds=self._seconds,
                num_devices=torch.distributed.get_world_size(),
                peak_tflops=self._peak_tflops,
            )
        return values | {"memory_gib": self._run.platform.peak_memory_gib()}
