import pytest
import torch

from megatron_dmtd.inference.ops.linear import DenseLinear


def test_a_dense_layer_is_its_matrix_and_its_bias():
    generator = torch.Generator().manual_seed(1)
    weight, bias, x = (torch.randn(*size, generator=generator) for size in ((5, 3), (5,), (2, 3)))
    linear = DenseLinear(weight.bfloat16(), bias)
    assert (linear.in_features, linear.out_features, linear.num_bytes) == (3, 5, 5 * 3 * 2 + 5 * 4)
    torch.testing.assert_close(linear.apply(x), x @ weight.bfloat16().float().T + bias)
    torch.testing.assert_close(DenseLinear(weight).apply(x.double()), x.double() @ weight.double().T)


def test_parts_are_loaded_in_place_and_converted():
    linear = DenseLinear.empty(5, 3, dtype=torch.bfloat16, bias_dtype=torch.float32)
    places = linear.weight.data_ptr(), linear.bias.data_ptr()
    rows = torch.arange(15.0).view(5, 3)
    for first, last in ((2, 5), (0, 2)):
        linear.load_weight(first, rows[first:last])
        linear.load_bias(first, rows[first:last, 0].double())
    assert torch.equal(linear.weight, rows.bfloat16()) and torch.equal(linear.bias, rows[:, 0])
    assert (linear.weight.data_ptr(), linear.bias.data_ptr()) == places
    with pytest.raises(AssertionError, match="a bias for a layer without one"):
        DenseLinear.empty(5, 3, dtype=torch.float32).load_bias(0, rows[:, 0])
