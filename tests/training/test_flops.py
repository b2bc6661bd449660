import itertools
from dataclasses import replace

import pytest

from megatron_dmtd.config import CycleConfig, ModelConfig
from megatron_dmtd.cycle import VANILLA, VARIANTS, visible
from megatron_dmtd.errors import ConfigError
from megatron_dmtd.training.flops import (
    attention_pairs,
    mfu,
    training_flops,
    training_flops_per_token,
    weights_per_token,
)

QWEN3_4B = ModelConfig()
QWEN3_8B = ModelConfig(hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False)
TINY = ModelConfig(
    num_layers=5, hidden_size=8, intermediate_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4, vocab_size=32
)
VANILLA_CYCLE = CycleConfig(variant=VANILLA)


def counted_pairs(variant: str, *, length: int, num_layers: int, num_parallel_layers: int) -> int:
    """Pairs counted one by one from the visibility rule; the real branch of the last parallel layer has no queries."""
    history, block_attention = VARIANTS[variant]
    total = num_layers - num_parallel_layers  # sequential layers: real slots only
    sequential = total * sum(key <= query for query, key in itertools.product(range(length), repeat=2))
    parallel = 0
    for layer in range(num_parallel_layers):
        query_streams = [False] if history == "shadow" or layer == num_parallel_layers - 1 else [False, True]
        key_streams = [False, True] if history == "real" else [False]
        for query_is_real, key_is_real in itertools.product(query_streams, key_streams):
            for query, key in itertools.product(range(length), repeat=2):
                parallel += bool(
                    visible(
                        query_is_real=query_is_real,
                        query_document=0,
                        query_position=query,
                        key_is_real=key_is_real,
                        key_document=0,
                        key_position=key,
                        cycle_length=4,
                        history=history,
                        block_attention=block_attention,
                    )
                )
    return sequential + parallel


def test_published_figures_of_qwen3_at_4k():
    assert training_flops_per_token(QWEN3_8B, VANILLA_CYCLE, document_length=4096) / 1e9 == pytest.approx(49.0, abs=0.05)
    assert training_flops_per_token(QWEN3_4B, VANILLA_CYCLE, document_length=4096) / 1e9 == pytest.approx(27.8, abs=0.06)


def test_a_tiny_vanilla_model_counted_by_hand():
    model = replace(TINY, num_layers=1)
    # q 8x16, k 8x8, v 8x8, o 16x8, three of 8x16, head 32x8; two tokens see 1 and 2 keys, 16 wide, scores and values
    weights = 128 + 64 + 64 + 128 + 3 * 128 + 256
    assert training_flops(model, VANILLA_CYCLE, document_lengths=[2]) == 6 * (2 * weights + 2 * 16 * 3)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_attention_counts_the_keys_that_the_rule_shows(variant):
    cycle = CycleConfig(variant=variant, num_parallel_layers=3)
    expected = counted_pairs(variant, length=12, num_layers=5, num_parallel_layers=3)
    assert attention_pairs(TINY, cycle, length=12) == expected


def test_norefresh_costs_what_vanilla_costs():
    vanilla = training_flops(QWEN3_4B, VANILLA_CYCLE, document_lengths=[4096])
    causal = training_flops(QWEN3_4B, CycleConfig(variant="causal-norefresh"), document_lengths=[4096])
    bidirectional = training_flops(QWEN3_4B, CycleConfig(variant="bidirectional-norefresh"), document_lengths=[4096])
    assert causal == vanilla
    assert 1 < bidirectional / vanilla < 1.001


def test_refresh_runs_the_parallel_layers_twice_but_for_the_last_real_one():
    layer = 2 * 2560 * 4096 + 2 * 2560 * 1024 + 3 * 2560 * 9728
    extra = weights_per_token(QWEN3_4B, CycleConfig(variant="causal-refresh")) - weights_per_token(QWEN3_4B, VANILLA_CYCLE)
    assert extra == 27 * layer + 2 * 2560 * 1024
    vanilla = training_flops(QWEN3_4B, VANILLA_CYCLE, document_lengths=[4096])
    for variant in ("causal-refresh", "bidirectional-refresh"):
        ratio = training_flops(QWEN3_4B, CycleConfig(variant=variant), document_lengths=[4096]) / vanilla
        assert ratio == pytest.approx(1.69, abs=0.01)


def test_packed_documents_attend_only_to_themselves():
    cycle = CycleConfig(variant="bidirectional-refresh", num_parallel_layers=3)
    apart = training_flops(TINY, cycle, document_lengths=[8]) + training_flops(TINY, cycle, document_lengths=[16])
    assert training_flops(TINY, cycle, document_lengths=(8, 16)) == apart
    assert apart < training_flops(TINY, cycle, document_lengths=[24])


def test_mfu_is_work_over_time_devices_and_peak():
    # Qwen3-8B on 16 H100: 10,456 tokens/s per device at 49.0 GFLOP are 512.7 TFLOP/s, 51.8 % of 989 TFLOP/s
    flops = training_flops_per_token(QWEN3_8B, VANILLA_CYCLE, document_length=4096) * 10_456 * 16
    assert mfu(flops=flops, seconds=1.0, num_devices=16, peak_tflops=989.4) == pytest.approx(0.518, abs=0.001)


def test_mfu_without_a_peak_is_refused():
    with pytest.raises(ConfigError, match="peak_tflops"):
        mfu(flops=1.0, seconds=1.0, num_devices=1, peak_tflops=0.0)


def test_a_cut_cycle_has_no_bidirectional_count():
    with pytest.raises(AssertionError, match=r"\(10, 4\)"):
        attention_pairs(TINY, CycleConfig(num_parallel_layers=3), length=10)
