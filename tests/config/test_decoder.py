from megatron_dmtd.architecture import num_parameters
from megatron_dmtd.config import CycleConfig, ModelConfig
from megatron_dmtd.config.decoder import decoder_of, method_of, schedule_of
from megatron_dmtd.cycle import ORDINARY


def test_the_default_settings_are_qwen3_4b():
    decoder = decoder_of(ModelConfig())
    assert num_parameters(decoder) == 4_022_468_096
    attention = decoder.layers[0].attention
    assert attention.qk_norm == decoder.final_norm and attention.rotary.theta == 1e6 and attention.window is None


def test_vanilla_settings_have_no_cycles_whatever_else_they_say():
    assert method_of(CycleConfig(variant="vanilla", cycle_length=4, num_parallel_layers=28)) == ORDINARY


def test_a_schedule_is_split_where_the_settings_say():
    schedule = schedule_of(ModelConfig(), CycleConfig(variant="causal-refresh", num_parallel_layers=28))
    assert (schedule.split, schedule.num_visits) == (28, 36)
    assert schedule.method.cycle_length == 4 and schedule.method.mask_token_id == 151660
