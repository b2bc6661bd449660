import pytest
import torch

from megatron_dmtd.hf import DMTDCache
from megatron_dmtd.hf.dmtd_cache import FIRST_CAPACITY
from tests.hf.tiny import decoded_logits, each_variant, random_ids, tiny_config, tiny_model


def test_a_new_cache_is_empty():
    cache = DMTDCache(tiny_config("causal-refresh"))
    assert (cache.lengths, cache.get_seq_length(), cache.batch_size, cache.get_max_length(), len(cache)) == ([], 0, -1, -1, 4)
    assert not cache.is_compileable and not cache.is_croppable
    assert cache.is_linear == cache.is_sliding == [False] * 4


@pytest.mark.parametrize(
    ("variant", "parallel"),
    [("causal-refresh", [0, 0, 0, 0, 4, 4]), ("causal-norefresh", [4, 4, 4, 4, 8, 8])],
)
def test_lengths_of_the_parallel_layers_follow_from_the_tokens(variant, parallel):
    cache = DMTDCache(tiny_config(variant))
    cache.lengths = [1, 2, 3, 4, 5, 8]
    assert cache.layer_lengths(1) == parallel
    assert cache.layer_lengths(2) == [1, 2, 3, 4, 5, 8]


@each_variant
def test_buffers_grow_past_their_first_capacity_without_changing_a_logit(variant):
    model = tiny_model(variant)
    length = FIRST_CAPACITY + 7
    ids = random_ids(1, length)
    torch.testing.assert_close(decoded_logits(model, ids, FIRST_CAPACITY - 6), model(ids).logits, rtol=0, atol=1e-10)


def test_capacity_doubles():
    cache = DMTDCache(tiny_config("causal-refresh"))
    cache.lengths = [1]
    row, one = torch.tensor([0]), torch.ones(1, 2, 8)
    capacities = []
    for position in (0, FIRST_CAPACITY - 1, FIRST_CAPACITY, 2 * FIRST_CAPACITY):
        cache.write(3, one * position, one, row=row, position=torch.tensor([position]), capacity=position + 1)
        capacities.append(cache.read(3, row_R=row, length=10**6)[0].shape[1])
    assert capacities == [64, 64, 128, 256]
    cache.lengths = [65]
    keys, _ = cache.row(3, 0)
    assert keys[[0, 1, 63, 64], 0, 0].tolist() == [0, 0, 63, 64]


def test_reading_a_layer_that_was_never_written_is_our_own_fault():
    cache = DMTDCache(tiny_config("causal-refresh"))
    cache.lengths = [1]
    with pytest.raises(AssertionError, match="layer 2 has not been written"):
        cache.read(2, row_R=torch.tensor([0]), length=1)
    with pytest.raises(AssertionError, match="layer 2 has not been written"):
        cache.row(2, 0)


def test_reset_makes_room_for_another_prompt():
    model, ids = tiny_model("bidirectional-refresh"), random_ids(2, 9)
    cache = model(ids, use_cache=True).cache
    cache.reset()
    assert cache.get_seq_length() == 0
    again = model(ids[:1, :6], cache=cache)
    assert again.cache is cache and cache.lengths == [6]
    torch.testing.assert_close(again.logits, model(ids[:1, :6]).logits)


@each_variant
@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ],
    ids=["reorder", "select", "repeat"],
)
def test_rows_can_be_chosen_and_then_go_on_as_if_they_had_been_alone(variant, change, rows):
    model, ids = tiny_model(variant), random_ids(3, 11)
    cache = model(ids[:, :6], use_cache=True).cache
    change(cache)
    assert cache.lengths == [6] * len(rows)
    logits = model(ids[rows, 6:], cache=cache).logits
    torch.testing.assert_close(logits, model(ids[rows]).logits[:, 6:], rtol=0, atol=1e-11)


@pytest.mark.parametrize(("method", "found"), [("crop", "crop a DMTDCache"), ("update", "Cache.update on a DMTDCache")])
def test_what_would_break_the_invariants_is_refused(method, found):
    cache = DMTDCache(tiny_config("causal-refresh"))
    with pytest.raises(ValueError, match=found):
        getattr(cache, method)(1)
