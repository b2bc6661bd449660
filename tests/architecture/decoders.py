"""Small decoders as data."""

from dataclasses import replace

from megatron_dmtd.architecture import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    LoopSpec,
    MLPSpec,
    NormSpec,
    RotaryProfile,
    uniform_layers,
)

NORM = NormSpec(eps=1e-6)
LAYER = LayerSpec(
    attention=AttentionSpec(
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, rotary=RotaryProfile(theta=1e4), qk_norm=NORM
    ),
    mlp=MLPSpec(intermediate_size=48),
    norm=NORM,
)


def decoder(**changes) -> DecoderSpec:
    """Four layers of width 32, tied."""
    whole = DecoderSpec(
        vocab_size=100,
        hidden_size=32,
        layers=(LAYER,) * 4,
        final_norm=NORM,
        tie_word_embeddings=True,
        max_position_embeddings=128,
    )
    return replace(whole, **changes)


def windowed(*, window: int, pattern: tuple[bool, ...]) -> DecoderSpec:
    """The same with sliding windows where `pattern` is true."""
    layer = replace(LAYER, attention=replace(LAYER.attention, window=window))
    return decoder(layers=uniform_layers(layer, len(pattern), is_windowed=pattern))


def looped(*, first: int = 1, num: int = 2, num_loops: int = 3, mode: str = "per_loop", injection: str = "add") -> DecoderSpec:
    """The same with `num` layers from `first` in a loop."""
    loop = LoopSpec(first_layer=first, num_layers=num, num_loops=num_loops, kv_cache_mode=mode, injection=injection, norm=None)
    return decoder(loop=loop)
