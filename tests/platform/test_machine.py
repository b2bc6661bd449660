"""The machine's limits: measured, consistent with each other, and turned into the least time of a piece of work."""

from __future__ import annotations

import pytest
import torch

from megatron_dmtd.errors import CapabilityError
from megatron_dmtd.platform import machine, products

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "READ_BYTES", 32 << 20)
    monkeypatch.setattr(machine, "LOOP_REPEATS", 200_000)
    monkeypatch.setattr(machine, "WIDTH", {"cpu": 256})
    monkeypatch.setattr(machine, "ROUNDS", 3)


def test_the_limit_of_a_piece_of_work_is_the_slower_of_reading_and_multiplying() -> None:
    one = machine.Machine(bytes_per_s=10.0, flops_per_s={torch.float32: 100.0, torch.bfloat16: 200.0})
    assert one.seconds(num_bytes=50, flops=100) == 5.0
    assert one.seconds(num_bytes=5, flops=100) == 1.0
    assert one.seconds(num_bytes=5, flops=100, dtype=torch.bfloat16) == 0.5
    assert machine.Machine(bytes_per_s=0.0, flops_per_s={torch.float32: 1.0}).seconds(num_bytes=0, flops=3) == 3.0


@pytest.mark.usefixtures("small")
def test_a_peak_is_the_better_of_multiply_adds_and_products() -> None:
    measured = machine.measure(CPU)
    assert 1e8 < measured.bytes_per_s < 1e13
    for dtype in machine.TYPES:
        assert 1e8 < measured.flops_per_s[dtype] < 1e15
    loop = machine.loop_flops_per_s(torch.float32)
    # multiply-adds of one thread, in its own CPU time: the same again within a factor that no other program explains
    assert loop == pytest.approx(machine.loop_flops_per_s(torch.float32), rel=0.5)
    assert loop > 0.8 * machine.product_flops_per_s(CPU, torch.float32)
    assert machine.loop_flops_per_s(torch.float64) == 0


@pytest.mark.usefixtures("small")
@pytest.mark.skipif(not products.has_bf16_instructions(), reason="this processor has no instructions for bf16")
def test_bf16_instructions_multiply_more_than_fp32_ones() -> None:
    assert machine.peak_flops_per_s(CPU, torch.bfloat16) > 1.3 * machine.peak_flops_per_s(CPU, torch.float32)


@pytest.mark.usefixtures("small")
def test_without_a_compiler_the_limits_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise CapabilityError(found="no C compiler", required="one", remedy="install gcc")

    monkeypatch.setattr(machine, "load_library", refuse)
    monkeypatch.setattr(machine, "_library", machine._library.__wrapped__)
    assert machine.loop_flops_per_s(torch.float32) == 0
    assert machine.peak_flops_per_s(CPU, torch.float32) > 1e8 and machine.read_bytes_per_s(CPU) > 1e8
