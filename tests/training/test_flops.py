import pytest

from megatron_dmtd.architecture.flops import training_flops_per_token
from megatron_dmtd.config import CycleConfig, ModelConfig
from megatron_dmtd.config.decoder import schedule_of
from megatron_dmtd.errors import ConfigError
from megatron_dmtd.training.flops import mfu


def test_mfu_is_work_over_time_devices_and_peak():
    # Qwen3-8B on 16 H100: 10,456 tokens/s per device at 49.0 GFLOP are 512.7 TFLOP/s, 51.8 % of 989 TFLOP/s
    qwen3_8b = ModelConfig(hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False)
    schedule = schedule_of(qwen3_8b, CycleConfig(variant="vanilla"))
    flops = training_flops_per_token(schedule, document_length=4096) * 10_456 * 16
    assert mfu(flops=flops, seconds=1.0, num_devices=16, peak_tflops=989.4) == pytest.approx(0.518, abs=0.001)


def test_mfu_without_a_peak_is_refused():
    with pytest.raises(ConfigError, match="peak_tflops"):
        mfu(flops=1.0, seconds=1.0, num_devices=1, peak_tflops=0.0)
