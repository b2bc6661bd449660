"""Settings of an engine: which are possible, alone and for a model."""

import pytest
import torch

from megatron_dmtd.errors import CapabilityError, ConfigError
from megatron_dmtd.inference import Engine, EngineConfig


@pytest.mark.parametrize(
    "fields",
    [{"max_batch": 1.5}, {"max_batch": 0}, {"max_batch": None}, {"max_length": "9"}, {"cache_tokens": -1}, {"kernels": "fast"}],
    ids=repr,
)
def test_an_impossible_config_is_refused_before_the_model_is_looked_at(fields, tmp_path):
    with pytest.raises(ConfigError, match=f"{next(iter(fields))}="):
        Engine(tmp_path / "absent", EngineConfig(**fields))
    with pytest.raises(ConfigError, match="a config of type dict"):
        Engine(tmp_path / "absent", {"max_batch": 2})


def test_settings_that_contradict_the_model_are_refused(pairs):
    directory = pairs["causal-refresh"].directory
    with pytest.raises(ConfigError, match="variant 'bidirectional-refresh' for a model trained as causal-refresh"):
        Engine(directory, variant="bidirectional-refresh")
    for config, message in (
        (EngineConfig(page_size=6), "page_size=6"),
        (EngineConfig(max_batch=0), "max_batch=0"),
        (EngineConfig(max_length=513), "max_length=513"),
        (EngineConfig(max_length=500, cache_tokens=64), "room for 64 tokens"),
        (EngineConfig(cache_tokens=8), "room for 0 pages"),
        (EngineConfig(kernels="fast"), "kernels='fast'"),
    ):
        with pytest.raises(ConfigError, match=message):
            Engine(directory, config, device="cpu")
    with pytest.raises(ConfigError, match="dtype 'int4'"):
        Engine(directory, dtype="int4")
    absent = "xpu" if torch.accelerator.is_available() else "cuda"
    with pytest.raises(CapabilityError, match=f"device {absent!r}, and"):
        Engine(directory, device=absent)
