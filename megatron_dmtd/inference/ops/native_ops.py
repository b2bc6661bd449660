"""The arithmetic of a layer in C, for a few rows in fp32 on a CPU. Same methods, and results to rounding, as those of `TorchOps`.

Results live in buffers that the next layer uses again: nothing is allocated in the steady state.

Shape legend: R rows, F rows that go on, X hidden size, H query heads, G key/value heads, E head size, I feed-forward size.
"""

from __future__ import annotations

import ctypes

import torch

from megatron_dmtd.errors import CapabilityError
from megatron_dmtd.inference.kv.store import KeyValuePool
from megatron_dmtd.inference.native.build import load_kernels
from megatron_dmtd.inference.ops.matmul import FastestMatmul
from megatron_dmtd.inference.passes import Pass
from megatron_dmtd.inference.weights import LayerWeights, ModelShape, ModelWeights

#: Entries per page and the head size are walked in whole vectors.
LANES = 16
#: Rows of one chunk beyond which a pass is a piece of a prompt, and torch's kernels win.
MAX_ROWS_PER_CHUNK = 16


class NativeOps:
    """Norms, matrices, rotary angles, stores and attention of passes with at most `max_rows` rows."""

    def __init__(
        self, model: ModelWeights, cos_TE: torch.Tensor, sin_TE: torch.Tensor, matmul: FastestMatmul, *, max_rows: int
    ) -> None:
        self.shape, self.cos_TE, self.sin_TE = model.shape, cos_TE, sin_TE
        self.matmul, self.max_rows = matmul, max_rows
        self.kernels = load_kernels()
        shape = self.shape
        widths = {
            "norm": shape.hidden_size,
            "qkv": shape.query_size + 2 * shape.key_size,
            "attended": shape.query_size,
            "gate_up": 2 * shape.intermediate_size,
            "inner": shape.intermediate_size,
        }
        # Views for every number of rows: making one takes as long as a small kernel.
        self._buffers = {
            name: [buffer[:rows] for rows in range(max_rows + 1)]
            for name, buffer in ((name, torch.empty(max_rows, width)) for name, width in widths.items())
        }
        self._by_width = {widths[name]: name for name in ("qkv", "gate_up")}

    @staticmethod
    def check(shape: ModelShape, *, dtype: torch.dtype, device: torch.device, page_size: int) -> None:
        """Accept a model and a page size, or raise `CapabilityError`."""
        if device.type != "cpu" or dtype != torch.float32:
            raise CapabilityError(
                found=f"{dtype} on {device}", required="float32 on the CPU", remedy="decode with kernels='torch'"
            )
        if page_size % LANES or shape.head_dim % LANES:
            raise CapabilityError(
                found=f"pages of {page_size} tokens, heads of {shape.head_dim}",
                required=f"multiples of {LANES}",
                remedy="choose another page_size, or decode with kernels='torch'",
            )

    def takes(self, run: Pass) -> bool:
        """Whether a pass is small enough for these kernels."""
        return len(run) <= self.max_rows and run.max_rows_per_chunk <= MAX_ROWS_PER_CHUNK

    def norm(self, x_RX: torch.Tensor, weight_X: torch.Tensor) -> torch.Tensor:
        """RMSNorm of contiguous rows."""
        rows, size = x_RX.shape
        out = self._buffers["norm"][rows]
        eps = self.shape.norm_eps
        self.kernels.dmtd_norm(x_RX.data_ptr(), weight_X.data_ptr(), out.data_ptr(), rows, size, eps)
        return out

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x @ weight.T + bias`."""
        rows, columns = x.shape[0], weight.shape[0]
        name = self._by_width.get(columns)
        out = torch.empty(rows, columns) if name is None else self._buffers[name][rows]
        return self.matmul.into(out, x, weight, bias, None)

    def linear_add(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual_RX: torch.Tensor
    ) -> torch.Tensor:
        """`residual + x @ weight.T + bias`, in the place of `residual`."""
        return self.matmul.into(residual_RX, x, weight, bias, residual_RX)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up`."""
        out = self._buffers["inner"][gate_up.shape[0]]
        self.kernels.dmtd_gate(gate_up.data_ptr(), out.data_ptr(), gate_up.shape[0], self.shape.intermediate_size)
        return out

    def rotate_and_store(
        self, qkv: torch.Tensor, weights: LayerWeights, run: Pass, pool: KeyValuePool, layer: int
    ) -> torch.Tensor:
        """Norm and rotate q and k in place, and store k and v of the rows that are written."""
        shape, tables, columns = self.shape, run.tables.page_SP, run.column_pointers
        self.kernels.dmtd_rotate_and_store(
            qkv.data_ptr(),
            _pointer(weights.q_norm_E),
            _pointer(weights.k_norm_E),
            self.cos_TE.data_ptr(),
            self.sin_TE.data_ptr(),
            columns[1],
            columns[2],
            columns[6],
            tables.data_ptr(),
            tables.shape[1],
            *pool.layer_pointers(layer),
            qkv.shape[0],
            shape.num_heads,
            shape.num_key_value_heads,
            shape.head_dim,
            run.page_size,
            shape.norm_eps,
        )
        return qkv

    def attend(self, qkv: torch.Tensor, run: Pass, pool: KeyValuePool, layer: int, *, final_only: bool) -> torch.Tensor:
        """Attention `[F, H * E]` of all rows, or of the final ones."""
        shape, tables = self.shape, run.tables.page_SP
        queries = run.final_runs if final_only else run.all_runs
        out = self._buffers["attended"][queries.row.shape[0]]
        self.kernels.dmtd_attend(
            qkv.data_ptr(),
            *pool.layer_pointers(layer),
            tables.data_ptr(),
            tables.shape[1],
            *run.column_pointers[2:6],
            queries.row.data_ptr(),
            queries.query_start.data_ptr(),
            queries.row_start.data_ptr(),
            queries.row_start.shape[0] - 1,
            out.data_ptr(),
            shape.num_heads,
            shape.num_key_value_heads,
            shape.head_dim,
            run.page_size,
        )
        return out


def _pointer(tensor: torch.Tensor | None) -> int | ctypes.c_void_p:
    return ctypes.c_void_p() if tensor is None else tensor.data_ptr()
