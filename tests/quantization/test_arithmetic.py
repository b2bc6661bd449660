"""The choice of arithmetic: native on a CPU with a compiler; with a warning, and the same bytes, without."""

import pytest
import torch

from megatron_dmtd.errors import CapabilityError
from megatron_dmtd.quantization import arithmetic, native, quantize_nvfp4


@pytest.fixture(autouse=True)
def fresh_choice():
    arithmetic._on_cpu.cache_clear()
    yield
    arithmetic._on_cpu.cache_clear()


def test_the_cpu_has_native_kernels_and_other_devices_have_torch():
    assert arithmetic.arithmetic_for(torch.zeros(1)) is native
    assert arithmetic.arithmetic_for(torch.zeros(1, device="meta")) is arithmetic.REFERENCE


def test_without_a_compiler_the_same_bytes_come_with_one_warning(monkeypatch):
    def refuse():
        raise CapabilityError(found="no C compiler", required="one", remedy="install gcc")

    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    expected = quantize_nvfp4(x)
    arithmetic._on_cpu.cache_clear()
    monkeypatch.setattr(native, "load_kernels", refuse)
    with pytest.warns(UserWarning, match="no C compiler") as caught:
        found = [quantize_nvfp4(x), quantize_nvfp4(x)]
    assert len(caught) == 1
    for parts in found:
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(parts[:2], expected[:2], strict=True))
