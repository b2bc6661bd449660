"""The arithmetic of a pass in compiled C, in fp32 on a CPU, for any number of rows. The same to rounding as `torch_ops`.

Results are in buffers that the next visit reuses: little is allocated in the steady state.

Shape legend: R rows of a pass, F rows that leave a visit, X hidden size, H query heads, G key/value heads, D head width, I
feed-forward width.
"""

from __future__ import annotations

import ctypes

import torch

from megatron_dmtd.architecture import DecoderSpec
from megatron_dmtd.errors import CapabilityError
from megatron_dmtd.inference.native.build import load_kernels
from megatron_dmtd.inference.ops.linear import DenseLinear, Linear
from megatron_dmtd.inference.ops.matmul import DenseProduct, Product
from megatron_dmtd.inference.ops.protocol import LayerVisit
from megatron_dmtd.inference.passes import ENTRY, POSITION, SLOT, Pass
from megatron_dmtd.inference.weights import ModelWeights, Norm

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


class NativeKernels:
    """Kernels and buffers for one model."""

    def __init__(self, model: ModelWeights, *, max_rows: int) -> None:
        """`max_rows`: of a pass that decodes. The products of more, which are pieces of prompts, are not measured."""
        self.library = load_kernels()
        self.products: dict[type, Product] = {DenseLinear: _dense_product(model, self.library, max_rows)}
        decoder = model.schedule.decoder
        self.norms = _buffers({decoder.hidden_size})
        self.linears = _buffers({linear.out_features for layer in model.layers for linear in (layer.qkv, layer.gate_up)})
        self.gated = _buffers({layer.spec.mlp.intermediate_size for layer in model.layers})
        self.attended = _buffers({layer.spec.attention.query_size for layer in model.layers})

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


def _dense_product(model: ModelWeights, library: ctypes.CDLL, max_rows: int) -> DenseProduct:
    measured_on = [linear for layer in model.layers[:2] for linear in layer.linears if isinstance(linear, DenseLinear)]
    return DenseProduct(library, measured_on, max_rows=max_rows)


class NativeOps:
    """See `protocol.Ops`."""

    def __init__(self, kernels: NativeKernels, run: Pass) -> None:
        self._kernels, self._library, self.run = kernels, kernels.library, run

    def norm(self, x_RX: torch.Tensor, norm: Norm) -> torch.Tensor:
        """See `Ops`. Of contiguous rows."""
        rows, size = x_RX.shape
        out = self._kernels.norms[size][rows]
        self._library.dmtd_norm(x_RX.data_ptr(), norm.weight.data_ptr(), out.data_ptr(), rows, size, norm.eps)
        return out

    def linear(self, x_RX: torch.Tensor, linear: Linear) -> torch.Tensor:
        """See `Ops`."""
        return self._into(self._kernels.linears[linear.out_features][x_RX.shape[0]], x_RX, linear, None)

    def linear_add(self, x: torch.Tensor, linear: Linear, residual_RX: torch.Tensor) -> torch.Tensor:
        """See `Ops`."""
        return self._into(residual_RX, x, linear, residual_RX)

    def _into(self, out: torch.Tensor, x: torch.Tensor, linear: Linear, residual: torch.Tensor | None) -> torch.Tensor:
        return self._kernels.products[type(linear)].into(out, x, linear, residual)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Ops`."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._kernels.gated[width][rows]
        self._library.dmtd_gate(gate_up.data_ptr(), out.data_ptr(), rows, width)
        return out

    def rotate_and_store(self, qkv: torch.Tensor, visit: LayerVisit) -> torch.Tensor:
        """See `Ops`. In place."""
        run, weights, sizes, pages = self.run, visit.weights, visit.attention, visit.pages.native
        addresses, columns = run.addresses(visit.group), run.column_pointers
        tables = addresses.table.page_SP
        self._library.dmtd_rotate_and_store(
            qkv.data_ptr(),
            _pointer(weights.q_norm),
            _pointer(weights.k_norm),
            visit.rotary.cos_ND.data_ptr(),
            visit.rotary.sin_ND.data_ptr(),
            columns[POSITION],
            columns[SLOT],
            columns[ENTRY],
            tables.data_ptr(),
            tables.shape[1],
            pages.k,
            pages.v,
            qkv.shape[0],
            sizes.num_attention_heads,
            sizes.num_key_value_heads,
            sizes.head_dim,
            run.page_size,
            0.0 if sizes.qk_norm is None else sizes.qk_norm.eps,
        )
        return qkv

    def attend(self, qkv: torch.Tensor, visit: LayerVisit, *, final_only: bool) -> torch.Tensor:
        """See `Ops`."""
        run, sizes, pages = self.run, visit.attention, visit.pages.native
        addresses, columns = run.addresses(visit.group), run.column_pointers
        tables, first = addresses.table.page_SP, addresses.first_column
        queries = run.final_runs if final_only else run.all_runs
        out = self._kernels.attended[sizes.query_size][queries.row.shape[0]]
        self._library.dmtd_attend(
            qkv.data_ptr(),
            pages.k,
            pages.v,
            tables.data_ptr(),
            tables.shape[1],
            columns[SLOT],
            *columns[first : first + 4],
            queries.row.data_ptr(),
            queries.query_start.data_ptr(),
            queries.row_start.data_ptr(),
            queries.row_start.shape[0] - 1,
            out.data_ptr(),
            sizes.num_attention_heads,
            sizes.num_key_value_heads,
            sizes.head_dim,
            run.page_size,
        )
        return out

    def head(self, hidden_FX: torch.Tensor, linear: Linear) -> torch.Tensor:
        """See `Ops`."""
        return self._into(torch.empty(hidden_FX.shape[0], linear.out_features), hidden_FX, linear, None)


def _pointer(norm: Norm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()
