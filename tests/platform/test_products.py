"""Products of every kind against float64, forward and backward; the choice between them."""

from __future__ import annotations

import pytest
import torch

from megatron_dmtd.platform import products
from megatron_dmtd.platform.choices import ROWS, Choice, Choices, Form

#: Largest error, in standard deviations of the result, without the rounding of the result itself. fp32 products that rounded
#: their operands to bf16 would be at 1e-2.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
ROUNDING = {torch.float32: 2**-23, torch.bfloat16: 2**-8}
SIZES = {"small": (7, 24, 40), "many rows": (65, 384, 200), "one row": (1, 2112, 2048)}


def all_take(name: str) -> Choices:
    """For fp32 too, which is never widened."""
    names = {"bfloat16": name, "float32": "torch" if name == "widened" else name}
    return Choices(
        tuple(
            Choice(dtype=dtype, form=form, rows=rows, product=name, gflops={})
            for dtype, name in names.items()
            for form in Form
            for rows in ROWS
        )
    )


@pytest.fixture(params=products.PRODUCTS)
def product_name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every product takes its turn, whatever this machine chose."""
    if request.param == "onednn" and "onednn" not in products.candidates(torch.bfloat16):
        pytest.skip("oneDNN does not multiply bf16 here")
    monkeypatch.setattr(products, "choices_of_this_machine", lambda: all_take(request.param))
    return request.param


def close(found: torch.Tensor, exact: torch.Tensor) -> bool:
    limit = TOLERANCE[found.dtype] * exact.std() + ROUNDING[found.dtype] * exact.abs()
    return bool(((found.double() - exact).abs() <= limit).all())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_a_product_and_its_gradients_are_those_of_float64(product_name: str, dtype: torch.dtype, size: str) -> None:
    rows, inputs, outputs = SIZES[size]
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 1, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    bias, grad = torch.randn(outputs).to(dtype), torch.randn(rows, 1, outputs).to(dtype)
    found = [t.clone().requires_grad_() for t in (x, weight, bias)]
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    out, expected = products.linear(*found), torch.nn.functional.linear(*exact)
    out.backward(grad)
    expected.backward(grad.double())
    assert out.dtype == dtype and close(out.detach(), expected.detach())
    assert torch.equal(products.linear(x, weight, bias), out)
    out.mul_(2)  # as Megatron's loss does with the logits
    for mine, its in zip(found, exact, strict=True):
        assert mine.grad is not None and its.grad is not None and close(mine.grad, its.grad)
