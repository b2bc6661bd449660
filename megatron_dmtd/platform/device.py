"""The device that a run uses. The rest of the project asks this module rather than `torch.cuda`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import resource
import socket
import warnings
from dataclasses import dataclass

import torch

#: all modules of Megatron-Core that this project reaches, so that the CPU shim finds them loaded; Megatron imports some lazily
_MEGATRON_MODULES = (
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader",
    "megatron.core.dist_checkpointing.strategies.common",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel",
    "megatron.core.timers",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """One process's device, and its backend for collectives."""

    device: torch.device
    """The device of parameters and batches."""
    backend: str
    """Backend of torch.distributed: `nccl` or `gloo`."""

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def peak_memory_gib(self) -> float:
        """Peak memory so far, in GiB: allocated on the GPU, or resident in this process."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated() / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    def describe(self) -> str:
        """The device in words, with the host."""
        name = torch.cuda.get_device_name() if self.is_cuda else f"CPU with {torch.get_num_threads()} threads"
        return f"{name} on {socket.gethostname()}"


def current_platform() -> Platform:
    """The GPU of this process's LOCAL_RANK if there is one, otherwise the CPU."""
    if torch.cuda.is_available():
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return Platform(device=torch.device("cuda", index), backend="nccl")
    return Platform(device=torch.device("cpu"), backend="gloo")


def has_transformer_engine_or_apex() -> bool:
    """Whether one of the libraries whose fused Adam Megatron looks for can be imported."""
    return any(
        importlib.util.find_spec(name) is not None for name in ("transformer_engine", "amp_C")
    )  # amp_C is NVIDIA Apex's extension; the PyPI package named apex is another project


def prepare_megatron() -> Platform:
    """Import Megatron-Core and adapt it to this machine. Call it before using `megatron.core`; it can be called again."""
    with warnings.catch_warnings():
        # Megatron warns once per module that Transformer Engine and Apex are missing.
        warnings.simplefilter("ignore")
        for name in _MEGATRON_MODULES:
            importlib.import_module(name)
    platform = current_platform()
    if not has_transformer_engine_or_apex():
        _install_adam()
    if not platform.is_cuda:
        from megatron_dmtd.platform import cpu

        cpu.install()
    return platform


def _install_adam() -> None:
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    from megatron_dmtd.platform.adam import FusedAdam

    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True
