import pytest
import torch

from megatron_dmtd.inference.kv.codec import PageShape, PlainCodec

SHAPE = PageShape(page_size=4, num_key_value_heads=2, head_dim=8)
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_written_at_an_address_is_read_there_and_all_else_is_zero(dtype):
    pages = PlainCodec(dtype).allocate(SHAPE, num_pages=5, device=CPU)
    k_RGD, v_RGD = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    pages.write(torch.tensor([4, 1, 4]), torch.tensor([0, 3, 2]), k_RGD, v_RGD)
    read = pages.read(torch.tensor([[4, 1], [0, 4]]))
    for found_BGKD, wrote_RGD in zip(read, (k_RGD, v_RGD)):
        expected = torch.zeros(2, 2, 8, 8, dtype=dtype)
        for request, entry, row in ((0, 0, 0), (0, 7, 1), (0, 2, 2), (1, 4, 0), (1, 6, 2)):
            expected[request, :, entry] = wrote_RGD[row]
        assert torch.equal(found_BGKD, expected)


def test_a_page_weighs_what_its_memory_weighs():
    codec = PlainCodec(torch.bfloat16)
    pages = codec.allocate(SHAPE, num_pages=5, device=CPU)
    assert 5 * codec.page_bytes(SHAPE) == pages.k_PGDT.nbytes + pages.v_PGTD.nbytes == 5 * 2 * 2 * 4 * 8 * 2


def test_native_kernels_get_addresses_of_fp32_pages_only():
    pages = PlainCodec(torch.float32).allocate(SHAPE, num_pages=5, device=CPU)
    assert (pages.native.k, pages.native.v) == (pages.k_PGDT.data_ptr(), pages.v_PGTD.data_ptr())
    with pytest.raises(AssertionError, match="bfloat16"):
        _ = PlainCodec(torch.bfloat16).allocate(SHAPE, num_pages=5, device=CPU).native
