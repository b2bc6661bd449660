"""Weights of a decoder, fused for decoding: one matrix gives q, k, v and the attention's gate, one gives gate and up.

They are read by the names of `architecture.tensors`, each once, into memory that is never moved: `ModelWeights.update` overwrites
it in place, so everything that holds an address (a CUDA graph, a kernel's arguments) computes with the new weights from then on.
Nothing here knows requests, caches or files.

Of a learned scale the factor is kept that it stands for (`architecture.ScaleSpec`), of a learned step its absolute value.

Shape legend: X hidden size, H query heads, D head width, I feed-forward width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megatron_dmtd.architecture import AttentionSpec, LayerSpec, MLPSpec, NormSpec, ScaleSpec, Schedule, StepSpec, decoder_tensors
from megatron_dmtd.architecture import tensors as names
from megatron_dmtd.cycle import Method
from megatron_dmtd.errors import CheckpointError
from megatron_dmtd.inference.ops.linear import DenseLinear, Linear

#: name -> tensor, called once for every name of `architecture.decoder_tensors`
ReadTensor = Callable[[str], torch.Tensor]
#: Overwrites the memory of one tensor.
WriteTensor = Callable[[torch.Tensor], object]


@dataclass(frozen=True, eq=False, slots=True)
class Norm:
    """Division of the last dimension by its root mean square, times a weight; without a weight, by its Euclidean norm."""

    weight: torch.Tensor | None
    eps: float


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """A learned step from a part's input towards its output: `norm(a + size * (b - a))`, a and b the two normed."""

    size_X: torch.Tensor
    """Absolute values."""
    norm: Norm


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class LayerWeights:
    """One layer."""

    spec: LayerSpec
    attention_norm: Norm
    qkv: Linear
    """Queries, keys and values of all heads, then the attention's gate if it has one."""
    q_norm: Norm | None
    k_norm: Norm | None
    query_scale: torch.Tensor | None
    """`[H * D]`, of rotated queries."""
    attention_gate: torch.Tensor | None
    """`[H * D]`, of the gate before its sigmoid."""
    output_norm: Norm | None
    o: Linear
    attention_step: Step | None
    mlp_norm: Norm
    gate_up: Linear
    gate_up_scale: torch.Tensor | None
    """`[2 * I]`"""
    inner_norm: Norm | None
    down: Linear
    mlp_step: Step | None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices of a visit."""
        return (self.qkv, self.o, self.gate_up, self.down)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class ModelWeights:
    """A whole decoder, and the order in which its layers are visited."""

    schedule: Schedule
    embedding_VX: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    head: Linear
    """Shares the embedding's memory if the two are tied."""
    logit_scale: torch.Tensor | None
    """`[V]`"""
    injection: Linear | None
    """From `[s; h]` to what a loop takes in (`architecture.LoopSpec`), where that is a matrix."""
    dtype: torch.dtype
    """Type of activations and caches. Matrices are of the same type, or bfloat16 under fp32 activations."""
    places: Mapping[str, WriteTensor]
    """Where each tensor is written, by its name in `architecture.decoder_tensors`."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a text, as the model's directory says."""
    directory: Path | None = None
    """Where its tokenizer may be; None for a model made in memory."""

    @property
    def method(self) -> Method:
        """The cycles that the schedule follows."""
        return self.schedule.method

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding_VX.device

    def update(self, read: ReadTensor) -> None:
        """Overwrite every weight in place. Types are converted; nothing else changes, addresses included.

        Raises:
            CheckpointError: `read` gives a tensor of another shape. Those before it have been overwritten.
        """
        with torch.no_grad():
            for name, expected in decoder_tensors(self.schedule.decoder).items():
                tensor = read(name)
                if tuple(tensor.shape) != expected.shape:
                    raise CheckpointError(
                        found=f"{name} of shape {list(tensor.shape)}",
                        required=f"{list(expected.shape)}",
                        remedy="give the weights of the same decoder",
                    )
                self.places[name](tensor)


def build_model(
    schedule: Schedule,
    read: ReadTensor,
    *,
    dtype: torch.dtype = torch.float32,
    matrix_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    stop_token_ids: tuple[int, ...] = (),
    directory: Path | None = None,
) -> ModelWeights:
    """Fuse the weights that `read` gives; they are copied, and converted where they are of other types.

    Args:
        schedule: The decoder, and the visits to its layers.
        read: Gives a tensor by its name.
        dtype: Type of norms, biases, activations and caches.
        matrix_dtype: Type to keep matrices and embeddings in; default `dtype`.
        device: Where to keep them.
        stop_token_ids: Tokens that end a text.
        directory: Where the tokenizer may be.

    Raises:
        CheckpointError: `read` gives a tensor of another shape.
    """
    builder = _Builder(schedule, vector_dtype=dtype, matrix_dtype=matrix_dtype or dtype, device=device)
    model = builder.model(stop_token_ids, directory)
    model.update(read)
    return model


class _Builder:
    """Memory for a decoder's weights, and the places of its tensors there."""

    def __init__(
        self, schedule: Schedule, *, vector_dtype: torch.dtype, matrix_dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.schedule, self.vector_dtype, self.matrix_dtype, self.device = schedule, vector_dtype, matrix_dtype, device
        self.shapes = {name: tensor.shape for name, tensor in decoder_tensors(schedule.decoder).items()}
        self.places: dict[str, WriteTensor] = {}

    def model(self, stop_token_ids: tuple[int, ...], directory: Path | None) -> ModelWeights:
        """The decoder, not loaded yet."""
        decoder = self.schedule.decoder
        table = self._linear([names.EMBEDDING])
        return ModelWeights(
            schedule=self.schedule,
            embedding_VX=table.weight,
            layers=tuple(self._layer(index, spec) for index, spec in enumerate(decoder.layers)),
            final_norm=self._norm(names.FINAL_NORM, decoder.final_norm),
            head=table if decoder.tie_word_embeddings else self._linear([names.HEAD]),
            logit_scale=self._scale(names.LOGIT_SCALE, decoder.logit_scale),
            injection=self._linear([names.INJECTION]) if f"{names.INJECTION}.weight" in self.shapes else None,
            dtype=self.vector_dtype,
            places=self.places,
            stop_token_ids=stop_token_ids,
            directory=directory,
        )

    def _layer(self, index: int, spec: LayerSpec) -> LayerWeights:
        name, attention = partial(names.layer_name, index), spec.attention
        return LayerWeights(
            spec=spec,
            attention_norm=self._norm(name(names.ATTENTION_NORM), spec.norm),
            qkv=self._linear([name(part) for part in _projections(attention)]),
            q_norm=self._norm_or_none(name(names.QUERY_NORM), attention.qk_norm),
            k_norm=self._norm_or_none(name(names.KEY_NORM), attention.qk_norm),
            query_scale=self._scale(name(names.QUERY_SCALE), attention.query_scale),
            attention_gate=self._scale(name(names.ATTENTION_GATE_SCALE), attention.gate),
            output_norm=self._norm_or_none(name(f"{names.OUTPUT}_norm"), attention.output_norm),
            o=self._linear([name(names.OUTPUT)]),
            attention_step=self._step(name(names.ATTENTION_STEP), spec.attention_step),
            mlp_norm=self._norm(name(names.MLP_NORM), spec.norm),
            gate_up=self._linear([name(part) for part in (names.GATE, names.UP)]),
            gate_up_scale=self._gate_up_scale(name, spec.mlp),
            inner_norm=self._norm_or_none(name(f"{names.DOWN}_norm"), spec.mlp.inner_norm),
            down=self._linear([name(names.DOWN)]),
            mlp_step=self._step(name(names.MLP_STEP), spec.mlp_step),
        )

    def _vector(self, size: int) -> torch.Tensor:
        return torch.ones(size, dtype=self.vector_dtype, device=self.device)

    def _norm(self, name: str, spec: NormSpec) -> Norm:
        if not spec.has_weight:
            return Norm(None, spec.eps)
        weight = self._vector(*self.shapes[f"{name}.weight"])
        self.places[f"{name}.weight"] = weight.copy_
        return Norm(weight, spec.eps)

    def _norm_or_none(self, name: str, spec: NormSpec | None) -> Norm | None:
        return None if spec is None else self._norm(name, spec)

    def _scale(self, name: str, spec: ScaleSpec | None, factor: torch.Tensor | None = None) -> torch.Tensor | None:
        """The factors of a learned scale, in `factor` if there is memory for them."""
        if spec is None:
            return None
        factor = self._vector(*self.shapes[f"{name}.weight"]) if factor is None else factor
        self.places[f"{name}.weight"] = partial(_write_scale, factor, spec)
        return factor

    def _gate_up_scale(self, name: Callable[[str], str], spec: MLPSpec) -> torch.Tensor | None:
        if spec.gate_scale is None and spec.up_scale is None:
            return None
        both = self._vector(2 * spec.intermediate_size)
        gate, up = both.chunk(2)
        self._scale(name(names.GATE_SCALE), spec.gate_scale, gate)
        self._scale(name(names.UP_SCALE), spec.up_scale, up)
        return both

    def _step(self, name: str, spec: StepSpec | None) -> Step | None:
        if spec is None:
            return None
        size_X = self._vector(*self.shapes[f"{name}.weight"])
        self.places[f"{name}.weight"] = partial(_write_step, size_X, spec.scale)
        return Step(size_X, self._norm(f"{name}_norm", spec.norm))

    def _linear(self, parts: Sequence[str]) -> DenseLinear:
        """One layer for parts that are applied to the same input, their rows concatenated."""
        sizes = [self.shapes[f"{part}.weight"] for part in parts]
        linear = DenseLinear.empty(
            sum(rows for rows, _ in sizes),
            sizes[0][1],
            dtype=self.matrix_dtype,
            bias_dtype=self.vector_dtype if f"{parts[0]}.bias" in self.shapes else None,
            device=self.device,
        )
        for part, first_row in zip(parts, _starts(rows for rows, _ in sizes)):
            self.places[f"{part}.weight"] = partial(linear.load_weight, first_row)
            if linear.bias is not None:
                self.places[f"{part}.bias"] = partial(linear.load_bias, first_row)
        return linear


def _projections(attention: AttentionSpec) -> tuple[str, ...]:
    gate = () if attention.gate is None else (names.ATTENTION_GATE,)
    return names.QUERY, names.KEY, names.VALUE, *gate


def _factor(spec: ScaleSpec, stored: torch.Tensor) -> torch.Tensor:
    return (stored.double() * spec.multiplier) ** spec.power


def _write_scale(factor: torch.Tensor, spec: ScaleSpec, stored: torch.Tensor) -> None:
    factor.copy_(_factor(spec, stored))


def _write_step(size: torch.Tensor, spec: ScaleSpec, stored: torch.Tensor) -> None:
    size.copy_(_factor(spec, stored).abs())


def _starts(sizes: Iterator[int]) -> Iterator[int]:
    """Where each of several neighbours begins."""
    start = 0
    for size in sizes:
        yield start
        start += size
