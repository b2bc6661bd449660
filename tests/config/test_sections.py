import dataclasses

import pytest

from megatron_dmtd.config import Config, CycleConfig
from megatron_dmtd.cycle import VANILLA, VARIANTS


def test_sections_are_frozen_and_named_by_keyword_only():
    for section in dataclasses.fields(Config):
        value = getattr(Config(), section.name)
        first = dataclasses.fields(value)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, first, None)
        with pytest.raises(TypeError, match="positional"):
            type(value)(getattr(value, first))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_its_history_and_its_block_attention(variant):
    block_attention, refresh = variant.split("-")
    cycle = CycleConfig(variant=variant)
    assert not cycle.is_vanilla
    assert (cycle.block_attention, cycle.history) == (block_attention, "real" if refresh == "refresh" else "shadow")


def test_vanilla_has_neither():
    vanilla = CycleConfig(variant="vanilla")
    assert vanilla.is_vanilla and VANILLA == "vanilla"
    with pytest.raises(KeyError):
        _ = vanilla.history


def test_the_defaults_are_qwen3_4b():
    model, cycle = Config().model, Config().cycle
    assert (model.num_layers, model.hidden_size, model.intermediate_size, model.vocab_size) == (36, 2560, 9728, 151936)
    assert (model.num_attention_heads, model.num_key_value_heads, model.head_dim) == (32, 8, 128)
    assert (cycle.num_parallel_layers, cycle.cycle_length, cycle.mask_token_id) == (28, 4, 151660)
