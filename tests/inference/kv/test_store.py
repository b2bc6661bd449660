import pytest
import torch

from megatron_dmtd.inference.kv.store import KeyValuePool, Pools, PoolShape, Tables


def pools(parallel_pages: int = 2, sequential_pages: int = 4) -> Pools:
    def one(name: str, num_pages: int) -> KeyValuePool:
        shape = PoolShape(num_layers=2, num_pages=num_pages, num_key_value_heads=3, page_size=4, head_dim=8)
        return KeyValuePool(shape, name=name, dtype=torch.float32, device=torch.device("cpu"))

    return Pools(one("P", parallel_pages), one("S", sequential_pages))


def test_tensors_have_a_place_for_every_page_and_start_finite():
    both = pools()
    assert both.parallel.k_LNGET.shape == (2, 2, 3, 8, 4)
    assert both.sequential.v_LNGTE.shape == (2, 4, 3, 4, 8)
    assert not both.parallel.k_LNGET.any()
    assert both.parallel.shape.page_bytes(torch.float32) == 2 * 2 * 3 * 4 * 8 * 4 == both.parallel.k_LNGET.nbytes


def test_missing_pages_are_counted_in_each_pool_by_itself():
    both, tables = pools(), Tables.empty()
    assert both.missing(tables, 9, 16) == (3, 4)
    both.grow(tables, 4, 9)
    assert both.missing(tables, 8, 16) == (1, 1)
    assert both.has_free(1, 1)
    assert not both.has_free(2, 1)
    assert not both.has_free(1, 2)
    both.check_integrity([tables])


def test_a_request_too_large_for_either_pool_can_never_be_held():
    both = pools()
    assert both.can_ever_hold(8, 16)
    assert not both.can_ever_hold(9, 16)
    assert not both.can_ever_hold(8, 17)


def test_release_returns_both_halves():
    both, tables = pools(), Tables.empty()
    both.grow(tables, 8, 16)
    both.release(tables)
    assert (both.parallel.pages.num_free, both.sequential.pages.num_free) == (2, 4)
    both.check_integrity([tables])


def test_the_check_sees_a_page_lost_in_either_pool():
    both, tables = pools(), Tables.empty()
    both.grow(tables, 4, 4)
    tables.parallel.pages.clear()
    with pytest.raises(AssertionError, match="P: page 0"):
        both.check_integrity([tables])
