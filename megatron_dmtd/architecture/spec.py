"""The parts of a decoder. Frozen values without behaviour: a new kind of part is a new value here and a builder where it is used.

The arithmetic that the values stand for, in the order of one layer:

    x = x + o(attention(rotate(norm(q(n))), rotate(norm(k(n))), v(n)))    with n = norm(x)
    x = x + down(silu(gate(m)) * up(m))                                   with m = norm(x)

Parts that a layer may have in addition, each absent by default, where `scale` is a `ScaleSpec`:

    query scale      scale * rotate(norm(q(n)))                           instead of rotate(norm(q(n)))
    attention gate   norm(attention(...) * sigmoid(scale * g(n)))         instead of attention(...)
    MLP scales       norm(silu(scale * gate(m)) * (scale * up(m)))        instead of silu(gate(m)) * up(m)
    learned step     norm(a + |scale| * (b - a)), a = norm(x), b = norm(y) instead of x + y

Names of quantities are those of Hugging Face's configurations.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)  # without slots: jsonargparse reads the defaults of a nested section by `vars`
class RopeScaling:
    """How rotary frequencies differ from the default ones. Fields are Hugging Face's; unused ones keep their defaults."""

    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    """`default`: not at all. `linear`: positions are divided by `factor`. `llama3`: long wavelengths are. `yarn`: the same with a
    ramp over the frequencies, and a factor on the attention's scores (arXiv 2309.00071)."""
    factor: float = 1.0
    """Ratio of the longer context to the original one; at least 1."""
    original_max_position_embeddings: int = 0
    """Tokens of the original context; positive for `llama3` and `yarn`, else 0."""
    low_freq_factor: float = 1.0
    """`llama3`: wavelengths above the original context over this number are divided by `factor`."""
    high_freq_factor: float = 4.0
    """`llama3`: wavelengths below the original context over this number are unchanged. Above `low_freq_factor`."""
    beta_fast: float = 32.0
    """`yarn`: frequencies with more rotations than this over the original context are unchanged."""
    beta_slow: float = 1.0
    """`yarn`: frequencies with fewer rotations than this are divided by `factor`."""
    attention_factor: float = 0.0
    """`yarn`: factor on cosines and sines. 0: derived from `factor` (and `mscale`, `mscale_all_dim` where they are set)."""
    mscale: float = 0.0
    """`yarn`: see `attention_factor`. 0: not set."""
    mscale_all_dim: float = 0.0
    """`yarn`: see `attention_factor`. 0: not set."""
    truncate: bool = True
    """`yarn`: whether the ends of the ramp are rounded to whole dimensions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryProfile:
    """Rotary position embedding of a layer's queries and keys; dimension i pairs with i + head_dim / 2."""

    theta: float
    """Base of the frequencies."""
    scaling: RopeScaling = field(default_factory=RopeScaling)


@dataclass(frozen=True, kw_only=True, slots=True)
class NormSpec:
    """Division of a vector by its length, computed in fp32 or wider."""

    eps: float
    """Added under the root: to the mean square (`rms`), or to the sum of squares (`unit`)."""
    kind: Literal["rms", "unit"] = "rms"
    """`rms`: by the root mean square, with a learned scale (RMSNorm). `unit`: by the Euclidean norm, without one."""

    @property
    def has_weight(self) -> bool:
        """Whether it has a learned scale."""
        return self.kind == "rms"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleSpec:
    """A learned factor per channel. Stored is a number s per channel; the factor is `(multiplier * s) ** power`."""

    initial: float
    """s in a new model."""
    multiplier: float
    power: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpec:
    """A step towards a part's output instead of a sum with it: see the top of this file (nGPT, arXiv 2410.01131)."""

    scale: ScaleSpec
    norm: NormSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """Grouped-query softmax attention, scores divided by the root of `head_dim`."""

    num_attention_heads: int
    num_key_value_heads: int
    """Divides the query heads."""
    head_dim: int
    """Even."""
    rotary: RotaryProfile
    qk_norm: NormSpec | None = None
    """Norm of each query and key head, before rotation; None: there is none."""
    qkv_bias: bool = False
    output_bias: bool = False
    window: int | None = None
    """Sliding window: most keys that a query sees, its own included. None: no limit."""
    query_scale: ScaleSpec | None = None
    """Of each channel of each query head, after rotation."""
    gate: ScaleSpec | None = None
    """Of each channel of the projection `g`, whose sigmoid multiplies the joined heads; None: there is no gate."""
    output_norm: NormSpec | None = None
    """Norm of all heads together, before the output projection."""

    @property
    def query_size(self) -> int:
        """Width of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_key_value_heads * self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPSpec:
    """Gated feed-forward layer with SiLU (SwiGLU), without biases."""

    intermediate_size: int
    gate_scale: ScaleSpec | None = None
    """Of each channel of the gate, before SiLU."""
    up_scale: ScaleSpec | None = None
    inner_norm: NormSpec | None = None
    """Norm of the gated activation, before the projection down."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One transformer layer."""

    attention: AttentionSpec
    mlp: MLPSpec
    norm: NormSpec
    """Before attention and before the MLP."""
    attention_step: StepSpec | None = None
    """How the output of attention joins the residual stream; None: it is added."""
    mlp_step: StepSpec | None = None
    """The same of the MLP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSpec:
    """Consecutive layers that run several times with the same weights.

    With h the hidden states that reach the first of them, and s those that leave the last one in loop k, loop k takes in:

        residual        norm(s_(k-1) + h), and s_k is normed again; s_0 = h
        add             s_(k-1) + h; s_0 = 0
        concat_linear   W [s_(k-1); h]; s_0 = h
    """

    first_layer: int
    """Index of the first of the layers."""
    num_layers: int
    num_loops: int
    """How often they run unless something else is asked for; at least 1."""
    kv_cache_mode: Literal["per_loop", "last_loop"]
    """What a later token sees of the layers: the keys and values of the same loop, or always those of the last one."""
    injection: Literal["residual", "add", "concat_linear"]
    """`residual`: Dory's (arXiv 2611.03998). `concat_linear`: Huginn's (arXiv 2502.05171)."""
    norm: NormSpec | None
    """Of `residual`; None for the others."""

    @property
    def last_layer(self) -> int:
        """Index of the last of the layers."""
        return self.first_layer + self.num_layers - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderSpec:
    """The weights of a decoder, and how each layer uses its own. The schedule says in which order layers are visited."""

    vocab_size: int
    """Tokens; the trainer pads its tables."""
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    tie_word_embeddings: bool
    """Whether the output head is the embedding table."""
    max_position_embeddings: int
    """Longest document, in tokens, that the decoder is meant to process."""
    logit_scale: ScaleSpec | None = None
    """Of each logit."""
    loop: LoopSpec | None = None
    """Layers that run several times; None: every layer runs once."""

    def __post_init__(self) -> None:
        assert self.layers, "a decoder without layers"
        assert self.loop is None or 0 <= self.loop.first_layer <= self.loop.last_layer < len(self.layers), self.loop

    @property
    def num_layers(self) -> int:
        """Layers with weights of their own."""
        return len(self.layers)

    @property
    def rotary_profiles(self) -> tuple[tuple[RotaryProfile, int], ...]:
        """Each (rotary profile, head width) that occurs, once, in the order of the layers."""
        return tuple(dict.fromkeys((layer.attention.rotary, layer.attention.head_dim) for layer in self.layers))


def uniform_layers(layer: LayerSpec, num_layers: int, *, is_windowed: tuple[bool, ...] = ()) -> tuple[LayerSpec, ...]:
    """`num_layers` layers like `layer`; those that `is_windowed` marks false see all keys (default: all are alike)."""
    if not is_windowed:
        return (layer,) * num_layers
    assert len(is_windowed) == num_layers, (len(is_windowed), num_layers)
    full = replace(layer, attention=replace(layer.attention, window=None))
    return tuple(layer if windowed else full for windowed in is_windowed)
