import pytest
import torch

from megatron_dmtd.models.transformer_config import DTYPES, pipeline_layout, transformer_config
from megatron_dmtd.parallel.placement import place
from megatron_dmtd.platform import prepare_megatron
from tests.support.tiny import tiny_config


@pytest.fixture(scope="module", autouse=True)
def megatron():
    prepare_megatron()


def test_sizes_are_those_of_the_decoder():
    found = transformer_config(tiny_config(), on_cuda=False)
    assert (found.num_layers, found.hidden_size, found.ffn_hidden_size) == (4, 32, 48)
    assert (found.num_attention_heads, found.num_query_groups, found.kv_channels) == (4, 2, 8)
    assert found.gated_linear_unit and found.normalization == "RMSNorm" and not found.add_bias_linear
    assert found.hidden_dropout == found.attention_dropout == 0.0


@pytest.mark.parametrize(("precision", "dtype"), DTYPES.items())
def test_precision_is_that_of_weights_and_of_messages(precision, dtype):
    found = transformer_config(tiny_config(training={"precision": precision}), on_cuda=False)
    assert (found.params_dtype, found.pipeline_dtype, found.bf16) == (dtype, dtype, precision == "bf16")
    assert DTYPES["fp32"] == torch.float32


def test_a_stage_is_listed_with_its_table_its_layers_and_its_loss():
    assert pipeline_layout(place(tiny_config())) is None
    two = place(tiny_config(parallel={"pipeline": 2, "stage_layers": (2, 2)}))
    assert [words.count("decoder") for words in pipeline_layout(two)] == [2, 2]
    assert pipeline_layout(two)[0][0] == "embedding" and pipeline_layout(two)[1][-1] == "loss"


@pytest.mark.parametrize(
    ("variant", "stage_layers", "vary"),
    [
        ("causal-refresh", (2, 2), False),  # the boundary lies where one stream is left
        ("causal-refresh", (1, 1, 2), True),
        ("causal-norefresh", (1, 1, 2), False),
        ("vanilla", (1, 1, 2), False),
    ],
)
def test_messages_vary_in_size_only_where_two_streams_cross_a_boundary(variant, stage_layers, vary):
    config = tiny_config(variant, parallel={"pipeline": len(stage_layers), "stage_layers": stage_layers})
    assert transformer_config(config, on_cuda=False).variable_seq_lengths is vary


@pytest.mark.parametrize(
    ("recompute", "granularity", "method"), [("none", None, None), ("selective", "selective", None), ("full", "full", "uniform")]
)
def test_recompute_is_megatrons(recompute, granularity, method):
    found = transformer_config(tiny_config(parallel={"recompute": recompute}), on_cuda=False)
    assert (found.recompute_granularity, found.recompute_method) == (granularity, method)


def test_virtual_stages_take_the_message_pair_that_trains_right():
    plain = transformer_config(tiny_config(parallel={"pipeline": 2}), on_cuda=False)
    assert (plain.overlap_p2p_comm, plain.batch_p2p_comm) == (False, True)
    virtual = transformer_config(tiny_config(parallel={"pipeline": 2, "virtual_stages": 2}), on_cuda=False)
    assert (virtual.overlap_p2p_comm, virtual.batch_p2p_comm) == (True, False)
    assert virtual.virtual_pipeline_model_parallel_size == 2
