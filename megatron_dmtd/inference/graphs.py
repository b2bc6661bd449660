"""Recordings of passes, which a CUDA device repeats without Python or kernel launches in between.

A `Program` takes no arguments and computes from tensors whose addresses are fixed. It is either called each time, on any device,
or captured as a CUDA graph. Capturing and replaying have never been run (docs/verification.md).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_dmtd.errors import CapabilityError

Program = Callable[[], torch.Tensor]
#: Calls before a capture: libraries allocate their workspaces in the first ones, which must not be recorded.
WARM_UP_CALLS = 2


def require_cuda(device: torch.device) -> None:
    """Accept a device that has CUDA graphs, or raise `CapabilityError`."""
    if device.type != "cuda":
        raise CapabilityError(
            found=f"CUDA graphs on {device}", required="a CUDA device", remedy="leave cuda_graphs at 'auto', or set it to 'off'"
        )


class GraphRecorder:
    """Captures programs; all graphs of one recorder share their memory, since they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        require_cuda(device)
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Program) -> Program:
        """A program that replays `compute`. It is called here, so calling it again on the same inputs must change nothing."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP_CALLS):
                    compute()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory):
                output = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


def direct(compute: Program) -> Program:
    """Without recording: the same shapes and the same work, on any device."""
    return compute
