"""Everything that Megatron-Core needs to run on a machine without CUDA, and only here.

Megatron-Core hard-codes its device (`device="cuda"`, `torch.cuda.current_device()`, `param.type()`). This module replaces the
global `torch` of every loaded `megatron.core` module by a proxy that answers those calls for the CPU and forwards the rest. For
all other code torch is unchanged, except for two tensor methods that check who calls them. Verified with megatron-core 0.16.1; a
later version may need more names. Nothing else in this project may patch a library.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_dmtd.errors import CapabilityError

_CPU = torch.device("cpu")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_INT = 2**31 - 1
_FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "full",
    "full_like",
    "ones",
    "ones_like",
    "rand",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)
#: modules that define kernels or compile functions: a proxy in place of torch breaks them, and we reach none of their device
#: calls
_NOT_PROXIED = ("megatron.core.fusions", "megatron.core.extensions", "megatron.core.jit")


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


class _CudaNames(types.ModuleType):
    """`torch.cuda` as Megatron sees it on a CPU; names not defined here are the real ones, which raise their own errors."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self.current_device = lambda: _CPU
        self.synchronize = lambda *args, **kwargs: None
        self.empty_cache = lambda: None
        self.manual_seed = torch.manual_seed
        self.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        self.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
        self.random = types.SimpleNamespace(get_rng_state=self.get_rng_state, set_rng_state=self.set_rng_state)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _TorchOnCPU(types.ModuleType):
    """`torch`, as a `megatron.core` module sees it."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _CudaNames()
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_PROXY = _TorchOnCPU()


def _called_by_megatron() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("megatron.core")


def _patch_tensor_methods() -> None:
    """`Tensor.type()` and `Tensor.cuda()` act as on CUDA when `megatron.core` calls them: its optimizers compare type names."""
    real_type, real_cuda = torch.Tensor.type, torch.Tensor.cuda

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = real_type(self, *args, **kwargs)
        if isinstance(answer, str) and _called_by_megatron():
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    def tensor_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _called_by_megatron() else real_cuda(self, *args, **kwargs)

    torch.Tensor.type = tensor_type  # type: ignore[assignment]
    torch.Tensor.cuda = tensor_cuda  # type: ignore[assignment]


def _patch_rng() -> None:
    """Make the RNG tracker hold states of the CPU generator."""
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    @contextlib.contextmanager
    def fork(self: Any, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        # The original warns if the CPU generator advanced, which is intended here.
        assert name in self.states_, f"random state {name} is not among {sorted(self.states_)}"
        outer = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer)

    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state
    megatron_random.CudaRNGStatesTracker.fork = fork


def _patch_linear_layers() -> None:
    """Let the parallel linear layers multiply in `products`."""
    from megatron.core.tensor_parallel import layers

    from megatron_dmtd.platform.linear import FrozenLinearOnCPU, LinearOnCPU

    layers.LinearWithGradAccumulationAndAsyncCommunication = LinearOnCPU
    layers.LinearWithFrozenWeight = FrozenLinearOnCPU


def _keep_freed_memory() -> None:
    """Let the C library reuse the memory of large tensors.

    By default glibc gives it back, and the next tensor of that size costs a page fault and 4 KiB of zeros per page: 4 % of the
    time of a training step of 135M parameters.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc alone has it
        for option, num_bytes in ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, _LARGEST_INT)):
            mallopt(option, num_bytes)


def _proxy_loaded_modules() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and not name.startswith(_NOT_PROXIED) and getattr(module, "torch", None) is torch:
            module.torch = _PROXY  # type: ignore[attr-defined]


_patched = False


def install() -> None:
    """Make the loaded `megatron.core` modules run on the CPU. Can be called again, for example after more of them are imported.

    Raises `CapabilityError` if CUDA is available: Megatron must not be changed there.
    """
    global _patched
    if torch.cuda.is_available():
        raise CapabilityError(
            found="a CUDA device",
            required="a machine without one: the CPU shim would hide the GPU from Megatron",
            remedy="run without the shim, or hide the GPU with CUDA_VISIBLE_DEVICES=",
        )
    _proxy_loaded_modules()
    if not _patched:
        _patch_tensor_methods()
        _patch_rng()
        _patch_linear_layers()
        _keep_freed_memory()
        _patched = True
