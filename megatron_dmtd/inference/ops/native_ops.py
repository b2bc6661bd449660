"""The arithmetic of a pass in compiled C, in fp32 on a CPU, for any number of rows. The same to rounding as `torch_ops`.

Results are in buffers that the next visit reuses: little is allocated in the steady state.

Shape legend: R rows of a pass, F rows that leave a visit, X hidden size, H query heads, G key/value heads, D head width, I
feed-forward width.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from megatron_dmtd.architecture import DecoderSpec
from megatron_dmtd.errors import CapabilityError
from megatron_dmtd.inference.cache_ops.passes import MovingVisit
from megatron_dmtd.inference.native.build import load_kernels
from megatron_dmtd.inference.ops.linear import DenseLinear, Linear
from megatron_dmtd.inference.ops.matmul import DenseProduct, Product
from megatron_dmtd.inference.ops.protocol import LayerVisit
from megatron_dmtd.inference.passes import ENTRY, POSITION, SLOT, Pass, QueryRuns
from megatron_dmtd.inference.weights import LayerWeights, ModelWeights, Norm, Step

#: Arguments of attention where no row reads a view.
_NO_VIEWS = (None, None, 0)
#: As in `elementwise.c`.
_NO_NORM, _RMS_NORM, _UNIT_NORM = range(3)
#: Entries per page and the head width are processed in whole vectors.
LANES = 16


class Buffer:
    """Memory for rows of one width, as views for every number of rows: making one takes as long as a small kernel."""

    def __init__(self, width: int) -> None:
        self._memory = torch.empty(0, width)
        self._views: dict[int, torch.Tensor] = {}

    def __getitem__(self, rows: int) -> torch.Tensor:
        """The first `rows` rows; more than ever before get new memory."""
        view = self._views.get(rows)
        if view is None:
            if rows > len(self._memory):
                self._memory = torch.empty(rows, self._memory.shape[1])
                self._views.clear()
            view = self._views[rows] = self._memory[:rows]
        return view


@dataclass(frozen=True, slots=True)
class VisitArguments:
    """What the kernels of a visit are given in every pass: addresses (None: there is no such part) and sizes."""

    norms_and_rotary: tuple[int, int, int | None, int | None, int | None, int, int]
    """Row length of q, k and v with what follows them; kind of norm; addresses of both norms, scales, cosines and sines."""
    pages: tuple[int, int]
    heads: tuple[int, int, int]
    """Query heads, key/value heads, head width."""
    eps: float


def _arguments(visit: LayerVisit) -> VisitArguments:
    weights, sizes, pages = visit.weights, visit.attention, visit.pages.native
    kind = _NO_NORM if weights.q_norm is None else _UNIT_NORM if weights.q_norm.weight is None else _RMS_NORM
    norms = _pointer(weights.q_norm), _pointer(weights.k_norm), _address(weights.query_scale)
    return VisitArguments(
        norms_and_rotary=(
            weights.qkv.out_features,
            kind,
            *norms,
            visit.rotary.cos_ND.data_ptr(),
            visit.rotary.sin_ND.data_ptr(),
        ),
        pages=(pages.k, pages.v),
        heads=(sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim),
        eps=0.0 if sizes.qk_norm is None else sizes.qk_norm.eps,
    )


class NativeKernels:
    """Kernels and buffers for one model."""

    def __init__(self, model: ModelWeights, *, max_rows: int, bf16_products: bool = False) -> None:
        """`max_rows`: of a pass that decodes. The products of more, which are pieces of prompts, are not measured.
        `bf16_products`: see `EngineConfig`.
        """
        self.library = load_kernels()
        self.products: dict[type, Product] = {DenseLinear: _dense_product(model, self.library, max_rows, bf16_products)}
        self._arguments: dict[LayerVisit, VisitArguments] = {}
        decoder = model.schedule.decoder
        self.norms = _buffers({decoder.hidden_size})
        widths = {linear.out_features for layer in model.layers for linear in (layer.qkv, layer.gate_up)}
        self.linears = _buffers({*widths, decoder.hidden_size})
        self.gated = _buffers({layer.spec.mlp.intermediate_size for layer in model.layers})
        self.attended = _buffers({layer.spec.attention.query_size for layer in model.layers})

    def arguments_of(self, visit: LayerVisit) -> VisitArguments:
        """Those of a visit, looked up once: weights and pages are never moved."""
        known = self._arguments.get(visit)
        if known is None:
            known = self._arguments[visit] = _arguments(visit)
        return known

    @staticmethod
    def check(decoder: DecoderSpec, *, dtype: torch.dtype, device: torch.device, page_size: int) -> None:
        """Accept a model and a page size, or raise `CapabilityError`."""
        if device.type != "cpu" or dtype != torch.float32:
            raise CapabilityError(
                found=f"{dtype} on {device}", required="float32 on the CPU", remedy="decode with kernels='torch'"
            )
        widths = sorted({layer.attention.head_dim for layer in decoder.layers})
        if page_size % LANES or any(width % LANES for width in widths):
            raise CapabilityError(
                found=f"pages of {page_size} tokens, heads of {' and '.join(map(str, widths))}",
                required=f"multiples of {LANES}",
                remedy="choose another page_size, or decode with kernels='torch'",
            )


def _buffers(widths: set[int]) -> dict[int, Buffer]:
    return {width: Buffer(width) for width in widths}


def _dense_product(model: ModelWeights, library: ctypes.CDLL, max_rows: int, bf16_products: bool) -> DenseProduct:
    measured_on = [linear for layer in model.layers[:2] for linear in layer.linears if isinstance(linear, DenseLinear)]
    return DenseProduct(library, measured_on, max_rows=max_rows, in_bfloat16=bf16_products)


class NativeOps:
    """See `protocol.Ops`."""

    def __init__(self, kernels: NativeKernels, run: Pass) -> None:
        self._kernels, self._library, self.run = kernels, kernels.library, run

    def norm(self, x_RX: torch.Tensor, norm: Norm) -> torch.Tensor:
        """See `Ops`. Of contiguous rows."""
        rows, size = x_RX.shape
        out = self._kernels.norms[size][rows]
        self._library.dmtd_norm(x_RX.data_ptr(), _pointer(norm), out.data_ptr(), rows, size, norm.eps)
        return out

    def linear(self, x_RX: torch.Tensor, linear: Linear) -> torch.Tensor:
        """See `Ops`."""
        return self._into(self._kernels.linears[linear.out_features][len(x_RX)], x_RX, linear, None)

    def linear_add(self, x: torch.Tensor, linear: Linear, residual_RX: torch.Tensor) -> torch.Tensor:
        """See `Ops`."""
        return self._into(residual_RX, x, linear, residual_RX)

    def _into(self, out: torch.Tensor, x: torch.Tensor, linear: Linear, residual: torch.Tensor | None) -> torch.Tensor:
        return self._kernels.products[type(linear)].into(out, x, linear, residual)

    def linear_step(self, x: torch.Tensor, linear: Linear, residual_RX: torch.Tensor, step: Step) -> torch.Tensor:
        """See `Ops`."""
        assert step.norm.weight is None, "a step whose norm has a weight"
        towards, (rows, size) = self.linear(x, linear), residual_RX.shape
        self._library.dmtd_step(residual_RX.data_ptr(), towards.data_ptr(), step.size_X.data_ptr(), rows, size, step.norm.eps)
        return residual_RX

    def gate(self, gate_up: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        """See `Ops`."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out, norm = self._kernels.gated[width][rows], weights.inner_norm
        self._library.dmtd_gate(gate_up.data_ptr(), _address(weights.gate_up_scale), out.data_ptr(), rows, width)
        if norm is not None:
            self._library.dmtd_norm(out.data_ptr(), _pointer(norm), out.data_ptr(), rows, width, norm.eps)
        return out

    def rotate_and_store(self, qkv: torch.Tensor, visit: LayerVisit) -> torch.Tensor:
        """See `Ops`. In place."""
        run, known = self.run, self._kernels.arguments_of(visit)
        columns, (rows, table, _) = run.column_pointers, self._tables(visit)
        self._library.dmtd_rotate_and_store(
            qkv.data_ptr(),
            *known.norms_and_rotary,
            columns[POSITION],
            rows,
            columns[ENTRY],
            *table,
            *known.pages,
            len(qkv),
            *known.heads,
            run.page_size,
            known.eps,
        )
        return qkv

    def _tables(self, visit: LayerVisit) -> tuple[int, tuple[int, int], tuple[int | None, int | None, int]]:
        """Of each row the row of the table with its pages, that table, and the views."""
        run, addresses = self.run, self.run.addresses(visit.group)
        if run.views is None:
            return run.column_pointers[SLOT], addresses.native_table, _NO_VIEWS
        found = run.views.native(visit.group, addresses.table.page_SP)
        return found.rows, found.table, found.views

    def move(self, visit: MovingVisit, columns: tuple[torch.Tensor, ...], turns: tuple[torch.Tensor, torch.Tensor]) -> None:
        """See `Ops`."""
        pages, sizes = visit.pages.native, visit.attention
        given = [tensor.data_ptr() for tensor in (*columns, *turns)]
        heads = sizes.num_key_value_heads, sizes.head_dim
        self._library.dmtd_move(pages.k, pages.v, *given, len(columns[0]), *heads, self.run.page_size)

    def attend(self, qkv: torch.Tensor, visit: LayerVisit, *, final_only: bool) -> torch.Tensor:
        """See `Ops`."""
        run, known = self.run, self._kernels.arguments_of(visit)
        rows, table, views = self._tables(visit)
        queries = run.final_runs if final_only else run.all_runs
        out = self._kernels.attended[visit.attention.query_size][queries.num_queries]
        self._library.dmtd_attend(
            qkv.data_ptr(),
            qkv.shape[1],
            *known.pages,
            *table,
            rows,
            *run.addresses(visit.group).native_reads,
            *queries.native,
            out.data_ptr(),
            *known.heads,
            run.page_size,
            *views,
        )
        self._gate_heads(out, qkv, visit.weights, queries)
        return out

    def _gate_heads(self, out: torch.Tensor, qkv: torch.Tensor, weights: LayerWeights, queries: QueryRuns) -> None:
        """Gate and norm attention's output in place."""
        norm, (rows, width) = weights.output_norm, out.shape
        if weights.attention_gate is not None:
            gate = qkv.data_ptr() + qkv.itemsize * (qkv.shape[1] - width)
            is_unit = norm is not None and norm.weight is None
            eps = norm.eps if norm is not None and is_unit else -1.0
            scale = weights.attention_gate.data_ptr()
            self._library.dmtd_gate_heads(out.data_ptr(), gate, qkv.shape[1], scale, queries.native[0], rows, width, eps)
            norm = None if is_unit else norm
        if norm is not None:
            self._library.dmtd_norm(out.data_ptr(), _pointer(norm), out.data_ptr(), rows, width, norm.eps)

    def head(self, hidden_FX: torch.Tensor, linear: Linear, scale: torch.Tensor | None) -> torch.Tensor:
        """See `Ops`."""
        logits_FV = self._into(torch.empty(hidden_FX.shape[0], linear.out_features), hidden_FX, linear, None)
        return logits_FV if scale is None else logits_FV.mul_(scale)


def _pointer(norm: Norm | None) -> int | None:
    return None if norm is None else _address(norm.weight)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
