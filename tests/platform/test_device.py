import os
import socket

import pytest
import torch

from megatron_dmtd.platform.device import Platform, current_platform, has_transformer_engine_or_apex, prepare_megatron

CPU = Platform(device=torch.device("cpu"), backend="gloo")


def test_without_a_gpu_the_platform_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert current_platform() == CPU and not CPU.is_cuda
    CPU.synchronize()


@pytest.mark.parametrize(("local_rank", "index"), [("0", 0), ("3", 3), ("5", 1)])
def test_each_process_of_a_node_takes_its_own_gpu(monkeypatch, local_rank, index):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    found = current_platform()
    assert (found.device, found.backend, found.is_cuda) == (torch.device("cuda", index), "nccl", True)
    assert chosen == [index]


def test_memory_of_a_process_is_in_gib_and_grows():
    before = CPU.peak_memory_gib()
    held = bytearray(os.urandom(1)) * (256 * 2**20)
    after = CPU.peak_memory_gib()
    assert len(held) == 2**28 and 0.01 < before <= after < 64
    with open("/proc/self/status") as status:
        (peak_kib,) = [int(line.split()[1]) for line in status if line.startswith("VmHWM")]
    assert after == pytest.approx(peak_kib / 2**20, rel=0.05)


def test_a_platform_is_described_with_its_host():
    assert CPU.describe() == f"CPU with {torch.get_num_threads()} threads on {socket.gethostname()}"


def test_megatron_can_be_prepared_twice_and_has_an_adam_without_apex():
    prepare_megatron()
    first = prepare_megatron()
    from megatron.core import optimizer

    from megatron_dmtd.platform.adam import FusedAdam

    assert first == current_platform()
    assert (optimizer.Adam is FusedAdam) == (not has_transformer_engine_or_apex())
