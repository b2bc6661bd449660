"""Products of few rows: every kernel, and which one is taken."""

import pytest
import torch

from megatron_dmtd.inference.native.build import load_kernels
from megatron_dmtd.inference.ops import matmul
from megatron_dmtd.inference.ops.linear import DenseLinear
from megatron_dmtd.inference.ops.matmul import DenseProduct


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 9, 16, 21])
@pytest.mark.parametrize("kernel", ["native", "products", "transposed"])
def test_every_kernel_gives_the_product(rows, kernel):
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 53, generator=generator), torch.randn(38, 53, generator=generator)
    bias, residual = torch.randn(38, generator=generator), torch.randn(rows, 38, generator=generator)
    product_of = DenseProduct(load_kernels(), [DenseLinear(weight)], max_rows=4)
    product = x.double() @ weight.double().t()
    for own_bias, own_residual, expected in (
        (None, None, product),
        (bias, None, product + bias),
        (bias, residual.clone(), product + bias + residual),
        (None, residual.clone(), product + residual),
    ):
        out = torch.empty(rows, 38) if own_residual is None else own_residual
        found = product_of.kernels[kernel](out, x, DenseLinear(weight, own_bias), own_residual)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [8, 9, 33, 64, 65, 130])
def test_products_in_several_blocks_of_columns_and_rows(rows, dtype):
    """Above eight rows weights are taken 256 columns at a time, above 64 the rows in parts: two whole blocks and a remainder.

    Level: fp32 sums of 705 products of standard normals, against float64.
    """
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 705, generator=generator), torch.randn(41, 705, generator=generator).to(dtype)
    out = torch.full((rows, 41), torch.nan)
    is_bf16 = int(dtype == torch.bfloat16)
    load_kernels().dmtd_matmul(x.data_ptr(), weight.data_ptr(), None, None, out.data_ptr(), rows, 705, 41, is_bf16)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "num_in", "num_out"), [(25, 1024, 96), (31, 2100, 49), (97, 1041, 101), (140, 60, 143)])
def test_many_rows_multiply_with_copies_of_a_part_of_the_matrix(rows, num_in, num_out, dtype):
    """More than 24 rows: 48 rows of the matrix at a time, 1,024 columns, 128 rows of x, and remainders of all.

    Level: fp32 sums against float64; bitwise on one and on two threads.
    """
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, num_in, generator=generator), torch.randn(num_out, num_in, generator=generator).to(dtype)
    bias, residual = torch.randn(num_out, generator=generator), torch.randn(rows, num_out, generator=generator)
    threads, found = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        out = residual.clone()
        pointers = (tensor.data_ptr() for tensor in (x, weight, bias, out, out))
        load_kernels().dmtd_matmul(*pointers, rows, num_in, num_out, int(dtype == torch.bfloat16))
        found.append(out)
    torch.set_num_threads(threads)
    expected = x.double() @ weight.double().t() + bias + residual
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=2e-4)
    assert torch.equal(*found)


@pytest.mark.parametrize("rows", [8, 9, 70])
def test_more_than_eight_rows_are_rounded_to_bfloat16_if_that_is_wanted(rows):
    """Against the same in plain torch: operands and product rounded, sums in fp32. Up to eight rows nothing is rounded.

    Level: one unit in the last of bfloat16's eight bits, where fp32 sums in another order round the other way.
    """
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 700, generator=generator), torch.randn(38, 700, generator=generator).bfloat16()
    bias, residual = torch.randn(38, generator=generator), torch.randn(rows, 38, generator=generator)
    product_of = DenseProduct(load_kernels(), [DenseLinear(weight)], max_rows=70, in_bfloat16=True)
    assert product_of.measured_ms == {} and product_of.kernel_for(rows) == ("native" if rows == 8 else "rounded")
    exact = x.double() @ weight.double().t()
    rounded = (x.bfloat16().float() @ weight.float().t()).bfloat16().double()
    for own_bias, own_residual in ((None, None), (bias, residual)):
        out = torch.full((rows, 38), torch.nan) if own_residual is None else own_residual.clone()
        found = product_of.into(out, x, DenseLinear(weight, own_bias), None if own_residual is None else out)
        added = 0 if own_bias is None else bias.double() + residual.double()
        assert found.dtype == torch.float32
        if rows == 8:
            torch.testing.assert_close(found.double(), exact + added, rtol=1e-5, atol=1e-4)
        else:
            torch.testing.assert_close(found.double(), rounded + added, rtol=2**-7, atol=1e-4)
            assert (found.double() - (rounded + added)).abs().lt(1e-5).double().mean() > 0.9


def test_bfloat16_weights_are_read_as_the_numbers_they_are():
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(8, 53, generator=generator), torch.randn(38, 53, generator=generator).bfloat16()
    out = torch.empty(8, 38)
    load_kernels().dmtd_matmul(x.data_ptr(), weight.data_ptr(), None, None, out.data_ptr(), 8, 53, 38, 1)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-5)


def test_few_rows_go_to_our_kernel_whatever_is_measured_and_more_to_the_fastest():
    few = DenseProduct(load_kernels(), [DenseLinear(torch.randn(38, 53))], max_rows=8)
    assert few.measured_ms == {} and few.kernel_for(8) == "native" and few.kernel_for(9) == "products"
    more = DenseProduct(load_kernels(), [DenseLinear(torch.randn(38, 53))], max_rows=20)
    assert list(more.measured_ms) == [12, 16, 24]
    more.measured_ms[16] = {"native": 1.0, "products": 0.8, "transposed": 0.95}
    more.measured_ms[24] = {"native": 1.0, "products": 0.95, "transposed": 2.0}
    assert [more._choice(rows) for rows in (1, 8, 13, 16, 17, 24)] == [
        "native",
        "native",
        "products",
        "products",
        "native",
        "native",
    ]


@pytest.mark.parametrize("block", [53 * 15, 1 << 23])
def test_many_rows_of_bfloat16_weights_are_widened_a_block_at_a_time(monkeypatch, block):
    """Level: fp32 sums against float64."""
    monkeypatch.setattr(matmul, "WIDE_BLOCK", block)
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(70, 53, generator=generator), torch.randn(38, 53, generator=generator).bfloat16()
    bias, residual = torch.randn(38, generator=generator), torch.randn(70, 38, generator=generator)
    product = DenseProduct(load_kernels(), [DenseLinear(weight)], max_rows=4)
    expected = x.double() @ weight.double().t() + bias
    for own_residual in (None, residual):
        out = torch.empty(70, 38) if own_residual is None else own_residual.clone()
        found = product.into(out, x, DenseLinear(weight, bias), None if own_residual is None else out)
        whole = expected if own_residual is None else expected + residual
        torch.testing.assert_close(found.double(), whole, rtol=1e-5, atol=1e-5)
    assert product._wide.numel() == min(38, block // 53) * 53
