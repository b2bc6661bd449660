"""A decoder as data: its layers, the schedule of visits to them, and what can be derived from the two.

`DecoderSpec` describes the layers; `Schedule` the order in which they are visited, by which streams, and which K and V are kept.
Shapes, parameter counts, FLOPs, kept activations and the K/V groups of decoding are computed from the two. No torch here:
`architecture.rotary`, which needs it, is imported by its own name.
"""

from megatron_dmtd.architecture.schedule import KVGroup, Schedule, Stream, Visit, make_schedule
from megatron_dmtd.architecture.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    LoopSpec,
    MLPSpec,
    NormSpec,
    RopeScaling,
    RotaryProfile,
    ScaleSpec,
    StepSpec,
    uniform_layers,
)
from megatron_dmtd.architecture.tensors import TensorShape, decoder_tensors, layer_tensors, num_parameters

__all__ = [
    "AttentionSpec",
    "DecoderSpec",
    "KVGroup",
    "LayerSpec",
    "LoopSpec",
    "MLPSpec",
    "NormSpec",
    "RopeScaling",
    "RotaryProfile",
    "ScaleSpec",
    "Schedule",
    "StepSpec",
    "Stream",
    "TensorShape",
    "Visit",
    "decoder_tensors",
    "layer_tensors",
    "make_schedule",
    "num_parameters",
    "uniform_layers",
]
