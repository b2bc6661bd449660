"""Dense masks and FlexAttention mask functions against docs/method.md, and the two kernels against each other.

Shape legend: B rows, H heads, N slots of a row, D head width, Q queries, K keys.
"""

from collections.abc import Callable

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from megatron_dmtd.cycle import VARIANTS, Method, documents, padded_document_lengths, positions, real_slots, shadow_slots
from megatron_dmtd.cycle.mask import (
    causal_document_mask_mod,
    dense_mask,
    mask_mod,
    shadow_attention_slots,
    stream_slots,
)
from tests.oracles.visibility import may_read, walk

WINDOWS = [None, 1, 3, 5]


def method(variant: str, cycle_length: int = 4) -> Method:
    return Method(variant=variant, cycle_length=cycle_length, num_parallel_layers=1)


def rows(layouts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """`document [B, N]` and `position [B, N]` of rows of equal length."""
    document_BN = torch.stack([torch.from_numpy(documents(lengths)) for lengths in layouts])
    position_BN = torch.stack([torch.from_numpy(positions(lengths)) for lengths in layouts])
    return document_BN, position_BN


def two_rows(cycle_length: int) -> list[list[int]]:
    """Two rows of four cycles whose documents end at different places."""
    return [[3 * cycle_length, cycle_length], [cycle_length, cycle_length, 2 * cycle_length]]


def expected(lengths: list[int], variant: str, cycle_length: int, window: int | None = None) -> list[list[bool]]:
    """Shadow queries by keys: the shadow stream, after the real one in the refresh variants."""
    shadow = walk("shadow", lengths, cycle_length)
    keys = (walk("real", lengths, cycle_length) if variant.endswith("-refresh") else []) + shadow
    return [[may_read(query, key, variant, window) for key in keys] for query in shadow]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("cycle_length", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("variant", VARIANTS)
def test_dense_mask_of_a_batch_is_the_specification_row_by_row(variant, cycle_length, window):
    layouts = two_rows(cycle_length)
    of = method(variant, cycle_length)
    queries, keys = shadow_attention_slots(*rows(layouts), method=of)
    mask_BQK = dense_mask(queries, keys, method=of, window=window)
    assert mask_BQK.dtype == torch.bool
    assert mask_BQK.tolist() == [expected(lengths, variant, cycle_length, window) for lengths in layouts]
    assert window == 1 or not torch.equal(mask_BQK[0], mask_BQK[1])


def test_the_keys_of_refresh_are_the_real_stream_and_then_the_shadow_stream():
    document, position = rows([[4, 4]])
    queries, keys = shadow_attention_slots(document, position, method=method("causal-refresh"))
    assert queries.is_real.tolist() == [[False] * 8]
    assert keys.is_real.tolist() == [[True] * 8 + [False] * 8]
    assert keys.position.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3] * 2]
    queries, keys = shadow_attention_slots(document, position, method=method("causal-norefresh"))
    assert keys is queries and keys.is_real.shape == (1, 8)


def test_dense_mask_takes_numpy_slots_of_one_row():
    mask_QK = dense_mask(shadow_slots([4, 4]), real_slots([4, 4]), method=method("causal-refresh", 2))
    assert mask_QK.int().tolist() == [[0] * 8] * 2 + [[1, 1] + [0] * 6] * 2 + [[0] * 8] * 2 + [[0] * 4 + [1, 1, 0, 0]] * 2


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("cycle_length", [1, 3, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_mask_mod_is_the_dense_mask(variant, cycle_length, window):
    of = method(variant, cycle_length)
    queries, keys = shadow_attention_slots(*rows(two_rows(cycle_length)), method=of)
    want_BQK = dense_mask(queries, keys, method=of, window=window)
    modifier = mask_mod(queries, keys, method=of, window=window)
    mask_BHQK = create_mask(modifier, 2, 1, want_BQK.shape[1], want_BQK.shape[2], device="cpu")
    assert torch.equal(mask_BHQK[:, 0], want_BQK)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_causal_document_mask_mod_is_the_rule_of_real_slots(variant, window):
    document_BN, position_BN = rows(two_rows(4))
    real = stream_slots(document_BN, position_BN, is_real=True)
    want_BQK = dense_mask(real, real, method=method(variant), window=window)
    mask_BHQK = create_mask(causal_document_mask_mod(document_BN, window=window), 2, 1, 16, 16, device="cpu")
    assert torch.equal(mask_BHQK[:, 0], want_BQK)
    assert want_BQK[0].sum() == sum(min(position + 1, window or 16) for length in (12, 4) for position in range(length))


def assert_flex_equals_sdpa(variant: str, attention: Callable[..., torch.Tensor], window: int | None = None) -> None:
    layouts = [[12, 20, 8], list(padded_document_lengths([33, 3], 4))]
    queries, keys = shadow_attention_slots(*rows(layouts), method=method(variant))
    mask_BQK = dense_mask(queries, keys, method=method(variant), window=window)
    num_queries, num_keys = mask_BQK.shape[1:]
    assert num_queries == 40 and num_keys == (80 if variant.endswith("-refresh") else 40)
    modifier = mask_mod(queries, keys, method=method(variant), window=window)
    block_mask = create_block_mask(modifier, 2, None, num_queries, num_keys, device="cpu", BLOCK_SIZE=16)
    assert 0 < block_mask.sparsity() < 100
    generator = torch.Generator().manual_seed(0)
    q_BHQD = 2 * torch.randn(2, 2, num_queries, 16, generator=generator)
    k_BHKD, v_BHKD = torch.randn(2, 2, 2, num_keys, 16, generator=generator)
    fused = attention(q_BHQD, k_BHKD, v_BHKD, block_mask=block_mask)
    dense = torch.nn.functional.scaled_dot_product_attention(q_BHQD, k_BHKD, v_BHKD, attn_mask=mask_BQK[:, None])
    torch.testing.assert_close(fused, dense, rtol=0, atol=2e-6)
    unmasked = torch.nn.functional.scaled_dot_product_attention(q_BHQD, k_BHKD, v_BHKD)
    assert (dense - unmasked).abs().max() > 0.1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("variant", VARIANTS)
def test_flex_attention_gives_the_numbers_of_sdpa_with_the_dense_mask(variant, window):
    assert_flex_equals_sdpa(variant, flex_attention, window)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_flex_attention_gives_the_numbers_of_sdpa_with_the_dense_mask(variant):
    assert_flex_equals_sdpa(variant, torch.compile(flex_attention))


def test_one_row_serves_a_block_mask_without_a_batch():
    of = method("bidirectional-refresh")
    queries, keys = shadow_attention_slots(*rows([[8, 8]]), method=of)
    modifier = mask_mod(queries, keys, method=of)
    mask_BHQK = create_mask(modifier, None, None, 16, 32, device="cpu")
    assert mask_BHQK[0, 0].tolist() == expected([8, 8], "bidirectional-refresh", 4)
