"""A GPU that is not there: tensors that say they lie on `cuda:N`, hold their numbers in host memory, and refuse to be mixed.

Every operation runs on the CPU, and gives what it gives there, if its tensors lie on one device; else it raises, as CUDA would.
So code runs as on a GPU, in the branches for GPUs, with real numbers. What is not tested: CUDA's own kernels, NCCL (gloo stands
in), `torch.compile` (functions stay as they are), memory and time.

Import it before torch, in a process of its own, with PRETEND_GPU_LIBRARY naming what `build` made. Checked with torch 2.13.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import subprocess
import types
from pathlib import Path
from typing import Any

LIBRARY = "PRETEND_GPU_LIBRARY"
_TORCH = Path(importlib.util.find_spec("torch").origin).parent


def build(folder: Path) -> Path:
    """Compile what torch must find before it is imported."""
    library = folder / "pretend_gpu.so"
    source = Path(__file__).with_suffix(".cpp")
    options = ["-std=c++20", "-shared", "-fPIC", f"-I{_TORCH / 'include'}", f"-L{_TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
    subprocess.run(["c++", str(source), "-o", str(library), *options], check=True)
    return library


if LIBRARY in os.environ:
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(_TORCH / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(os.environ[LIBRARY])

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: E402

_aten = torch.ops.aten
#: the operations that may take tensors of several devices
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
#: those that read indices from the host, too, as CUDA's do
_INDEXING = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default, _aten._index_put_impl_.default}
#: those for which the host waits, or that it cannot repeat without knowing the numbers: none may be in a CUDA graph
_WAITING = {_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.equal.default}


class OnGpu(torch.Tensor):
    """A tensor on a pretended GPU; `host` holds its numbers."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor, device: torch.device) -> OnGpu:
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset(), "dtype": host.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, host.size(), device=device, **layout)
        made.host = host
        return made

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: OnGpu) -> None:
        torch.Tensor.data.__set__(self, value)
        self.host = value.host

    def tolist(self) -> Any:
        return self.host.tolist()

    def __repr__(self) -> str:
        return f"OnGpu({self.host}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _check(func: Any, tensors: list[torch.Tensor], first: Any) -> None:
    on_gpu = {tensor.device for tensor in tensors if isinstance(tensor, OnGpu)}
    on_host = [tensor for tensor in tensors if not isinstance(tensor, OnGpu) and tensor.dim() > 0]
    if func in _INDEXING:
        on_host = [tensor for tensor in on_host if tensor is first]
    if func not in _COPIES and (len(on_gpu) > 1 or (on_gpu and on_host)):
        raise AssertionError(f"{func} of tensors on {sorted({str(tensor.device) for tensor in tensors})}")


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    _check(func, tensors, args[0] if args else None)
    on_gpu = [tensor.device for tensor in tensors if isinstance(tensor, OnGpu)]
    device = tensors[0].device if func in _COPIES else (on_gpu or [torch.device("cpu")])[0]
    host_args, host_kwargs = tree_map_only(OnGpu, lambda tensor: tensor.host, (args, kwargs))
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        host_kwargs["device"] = torch.device("cpu") if device.type == "cuda" else device
    host_kwargs.pop("pin_memory", None)
    out = func(*host_args, **host_kwargs)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        out = tree_map_only(torch.Tensor, lambda tensor: OnGpu(tensor, device), out)
    return return_and_correct_aliasing(func, args, kwargs, out) if on_gpu and func.namespace != "c10d" else out


class PretendedMachine(TorchDispatchMode):
    """In it, `device="cuda"` makes tensors on the pretended GPU."""

    def __enter__(self) -> PretendedMachine:
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Capture(TorchDispatchMode):
    """Refuses what a CUDA graph cannot record: operations that the host waits for, and tensors of the host."""

    num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        used = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        if func in _WAITING or any(tensor.device.type != "cuda" for tensor in used):
            raise AssertionError(f"{func} in a CUDA graph, with tensors on {[str(tensor.device) for tensor in used]}")
        Capture.num_operations += 1
        return out


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...


class _Nothing(contextlib.nullcontext):
    pass


def _apply_keeping_parameters(module: torch.nn.Module, convert: Any, recurse: bool = True) -> torch.nn.Module:
    """`Module._apply`, which on a GPU keeps a parameter's marks and on a subclass of Tensor does not."""
    for child in module.children():
        _apply_keeping_parameters(child, convert)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            with torch.no_grad():
                moved = torch.nn.Parameter(convert(parameter), requires_grad=parameter.requires_grad)
            moved.__dict__.update({key: value for key, value in parameter.__dict__.items() if key != "host"})
            module._parameters[name] = moved
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = convert(buffer)
    return module


def _tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    numbers = tree_map_only(OnGpu, lambda tensor: tensor.item(), data) if isinstance(data, list) else data
    return _new_tensor(numbers, *args, **kwargs)


def _init_process_group(backend: str, **kwargs: Any) -> None:
    assert backend == "nccl", backend
    _new_process_group(backend="gloo", **kwargs)


def install(*, num_gpus: int) -> None:
    """Let torch see `num_gpus` GPUs."""
    cuda, properties = (
        torch.cuda,
        types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=2**37, warp_size=32),
    )
    host_state = torch.get_rng_state
    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": num_gpus,
        "current_device": 0,
        "get_device_name": "pretended GPU",
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "max_memory_allocated": 0,
        "is_current_stream_capturing": False,
    }
    for name, answer in answers.items():
        setattr(cuda, name, lambda *_, answer=answer, **__: answer)
    for name in (
        "set_device",
        "synchronize",
        "empty_cache",
        "manual_seed",
        "manual_seed_all",
        "set_rng_state",
        "_lazy_init",
        "_lazy_call",
    ):
        setattr(cuda, name, lambda *_, **__: None)
    cuda.get_rng_state = lambda *_, **__: host_state()
    cuda.Stream, cuda.device = _Stream, _Nothing
    cuda.current_stream, cuda.stream = lambda *_: _Stream(), lambda *_: contextlib.nullcontext()
    torch.accelerator.device_count = lambda: num_gpus
    torch.nn.Module._apply = _apply_keeping_parameters
    torch.inference_mode = torch.no_grad  # which subclasses of Tensor do not know
    torch.tensor, torch.compile = _tensor, lambda function=None, **_: function if function is not None else (lambda other: other)
    torch.distributed.init_process_group = _init_process_group


_new_tensor, _new_process_group = torch.tensor, torch.distributed.init_process_group
