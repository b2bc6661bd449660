"""The CPU shim: what Megatron sees, what nobody else sees."""

from __future__ import annotations

import os
import resource

import torch

from megatron_dmtd.platform import current_platform, prepare_megatron
from megatron_dmtd.platform.device import has_transformer_engine_or_apex
from tests.support.ranks import run_ranks


def test_megatron_makes_its_tensors_on_the_cpu_and_torch_itself_is_unchanged() -> None:
    platform = prepare_megatron()
    from megatron.core.pipeline_parallel import schedules

    assert (platform.backend, platform.device) == ("gloo", torch.device("cpu"))
    assert schedules.torch is not torch
    assert schedules.torch.zeros([], dtype=torch.int, device="cuda").device.type == "cpu"
    assert schedules.torch.cuda.current_device() == torch.device("cpu")
    assert schedules.torch.Tensor is torch.Tensor
    assert not torch.cuda.is_available()
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_installing_again_changes_nothing() -> None:
    prepare_megatron()
    from megatron.core import optimizer
    from megatron.core.pipeline_parallel import schedules

    before = schedules.torch, torch.Tensor.type, optimizer.Adam
    prepare_megatron()
    assert before == (schedules.torch, torch.Tensor.type, optimizer.Adam)


def test_the_memory_of_large_tensors_is_reused() -> None:
    prepare_megatron()
    faults = []
    for _ in range(20):
        torch.zeros(64 << 20, dtype=torch.uint8)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    pages = (64 << 20) / resource.getpagesize()
    # The first ones grow the heap, or find a small allocation in their way.
    assert faults[-1] - faults[4] < 15 * pages / 4


def _forks() -> tuple[list[float], list[float]]:
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(5, tp_rank=0, ep_rank=0, etp_rank=0)
    outer = [torch.rand(1).item()]
    tracker = tensor_parallel.get_cuda_rng_tracker()
    with tracker.fork():
        inner = [torch.rand(1).item()]
    with tracker.fork():
        inner.append(torch.rand(1).item())
    outer.append(torch.rand(1).item())
    return outer, inner


def test_a_forked_random_state_goes_on_where_it_was_left_and_the_outer_one_does_not_move() -> None:
    outer, inner = run_ranks(1, _forks)[0]
    torch.manual_seed(5)
    assert outer == [torch.rand(1).item(), torch.rand(1).item()]
    torch.manual_seed(5 + 2718)
    assert inner == [torch.rand(1).item(), torch.rand(1).item()]


def test_tests_that_do_not_ask_for_a_gpu_find_none() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert not torch.cuda.is_available()


def test_the_platform_describes_itself() -> None:
    platform = current_platform()
    assert "CPU" in platform.describe()
    assert 0 < platform.peak_memory_gib() < 1000
    assert not has_transformer_engine_or_apex()
    platform.synchronize()
