import dataclasses

import pytest

from megatron_dmtd.architecture.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    RopeScaling,
    RotaryProfile,
    uniform_layers,
)

NORM = NormSpec(eps=1e-6)
LAYER = LayerSpec(
    attention=AttentionSpec(num_attention_heads=6, num_key_value_heads=2, head_dim=8, rotary=RotaryProfile(theta=1e4), window=16),
    mlp=MLPSpec(intermediate_size=48),
    norm=NORM,
)


def decoder(layers):
    return DecoderSpec(
        vocab_size=100,
        hidden_size=32,
        layers=layers,
        final_norm=NORM,
        tie_word_embeddings=True,
        max_position_embeddings=128,
    )


def test_widths_follow_from_heads():
    assert (LAYER.attention.query_size, LAYER.attention.key_size) == (48, 16)


def test_only_marked_layers_keep_their_window():
    assert uniform_layers(LAYER, 3) == (LAYER, LAYER, LAYER)
    windows = [layer.attention.window for layer in uniform_layers(LAYER, 3, is_windowed=(True, False, True))]
    assert windows == [16, None, 16]
    full = uniform_layers(LAYER, 1, is_windowed=(False,))[0]
    assert dataclasses.replace(full, attention=LAYER.attention) == LAYER, "nothing but the window changes"
    with pytest.raises(AssertionError):
        uniform_layers(LAYER, 3, is_windowed=(True,))


def test_each_rotary_profile_is_named_once_in_the_order_of_the_layers():
    scaled = RotaryProfile(theta=1e4, scaling=RopeScaling(rope_type="linear", factor=2.0))
    other = dataclasses.replace(LAYER, attention=dataclasses.replace(LAYER.attention, rotary=scaled))
    wide = dataclasses.replace(LAYER, attention=dataclasses.replace(LAYER.attention, head_dim=16))
    found = decoder((LAYER, other, LAYER, wide))
    assert found.num_layers == 4
    assert found.rotary_profiles == ((RotaryProfile(theta=1e4), 8), (scaled, 8), (RotaryProfile(theta=1e4), 16))


def test_a_decoder_is_a_value():
    assert decoder((LAYER,)) == decoder((LAYER,)) and hash(decoder((LAYER,))) == hash(decoder((LAYER,)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        decoder((LAYER,)).hidden_size = 1  # type: ignore[misc]
    with pytest.raises(AssertionError, match="without layers"):
        decoder(())
