"""The arithmetic of a layer in torch: any device, any type, any number of rows. The native kernels are compared with it.

Shape legend: R rows, F rows that go on, X hidden size, H query heads, G key/value heads, E head size, I inner size, B chunks
with equally many rows, r rows of such a chunk, n pages, T entries per page, K keys.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from megatron_dmtd.inference.kv.store import KeyValuePool
from megatron_dmtd.inference.passes import Group, Pass
from megatron_dmtd.inference.static_pass import StaticPass
from megatron_dmtd.inference.weights import LayerWeights, ModelShape


class TorchOps:
    """Norms, matrices, rotary angles, stores and attention."""

    def __init__(self, shape: ModelShape, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> None:
        self.shape, self.cos_TE, self.sin_TE = shape, cos_TE, sin_TE

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last dimension, in fp32 or wider."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.shape.norm_eps)).to(x.dtype)

    def linear(self, x_RX: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x @ weight.T + bias`."""
        return functional.linear(x_RX, weight.to(x_RX.dtype), bias)

    def linear_add(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual_RX: torch.Tensor
    ) -> torch.Tensor:
        """`residual + x @ weight.T + bias`."""
        return residual_RX + functional.linear(x, weight.to(x.dtype), bias)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up`."""
        gate_RI, up_RI = gate_up.chunk(2, dim=-1)
        return functional.silu(gate_RI) * up_RI

    def rotate_and_store(
        self, qkv: torch.Tensor, weights: LayerWeights, run: Pass | StaticPass, pool: KeyValuePool, layer: int
    ) -> torch.Tensor:
        """Norm and rotate q and k, and store k and v of the rows that are written. Returns the new q, k and v side by side."""
        shape = self.shape
        q_RHE, k_RGE, v_RGE = self._heads(qkv)
        if weights.q_norm_E is not None and weights.k_norm_E is not None:
            q_RHE, k_RGE = self.norm(q_RHE, weights.q_norm_E), self.norm(k_RGE, weights.k_norm_E)
        cos_R1E, sin_R1E = self.cos_TE[run.position_R][:, None], self.sin_TE[run.position_R][:, None]
        q_RHE, k_RGE = _rotated(q_RHE, cos_R1E, sin_R1E), _rotated(k_RGE, cos_R1E, sin_R1E)
        row, page, entry = run.written
        pool.k_LNGET[layer, page, :, :, entry] = k_RGE[row]
        pool.v_LNGTE[layer, page, :, entry] = v_RGE[row]
        return torch.cat([q_RHE.reshape(-1, shape.query_size), k_RGE.reshape(-1, shape.key_size), qkv[:, -shape.key_size :]], 1)

    def attend(
        self, qkv: torch.Tensor, run: Pass | StaticPass, pool: KeyValuePool, layer: int, *, final_only: bool
    ) -> torch.Tensor:
        """Attention `[F, H * E]` of all rows, or of the final ones."""
        q_RHE, k_RGE, v_RGE = self._heads(qkv)
        groups = run.final_groups if final_only else run.groups
        parts = [self._attend_group(q_RHE, k_RGE, v_RGE, group, pool, layer) for group in groups]
        if len(groups) == 1:
            return parts[0]
        attended = torch.empty_like(qkv[:, : self.shape.query_size])
        for group, part in zip(groups, parts):
            attended[group.query_Br.flatten()] = part
        return attended[run.final_F] if final_only else attended

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape = self.shape
        q, k, v = qkv.split([shape.query_size, shape.key_size, shape.key_size], dim=-1)
        return tuple(part.unflatten(-1, (-1, shape.head_dim)) for part in (q, k, v))

    def _attend_group(
        self,
        q_RHE: torch.Tensor,
        k_RGE: torch.Tensor,
        v_RGE: torch.Tensor,
        group: Group,
        pool: KeyValuePool,
        layer: int,
    ) -> torch.Tensor:
        """The query heads that share a key head are laid along the sequence, so that no key is copied."""
        groups, size = k_RGE.shape[1:]
        k_BGKE = _entries_of(pool.k_LNGET[layer].transpose(-2, -1), group.page_Bn)
        v_BGKE = _entries_of(pool.v_LNGTE[layer], group.page_Bn)
        if group.key_Br is not None:
            k_BGKE = torch.cat([k_BGKE, k_RGE[group.key_Br].transpose(1, 2)], dim=2)
            v_BGKE = torch.cat([v_BGKE, v_RGE[group.key_Br].transpose(1, 2)], dim=2)
        heads = q_RHE[group.query_Br].unflatten(2, (groups, -1))  # [B, r, G, H/G, E]
        folded = heads.permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = group.mask_BrK.repeat(1, heads.shape[3], 1)[:, None]
        out = functional.scaled_dot_product_attention(folded, k_BGKE, v_BGKE, attn_mask=mask)
        rows = out.unflatten(2, (heads.shape[3], -1)).permute(0, 3, 1, 2, 4)
        return rows.reshape(-1, groups * heads.shape[3] * size)


def _entries_of(pages_NGTE: torch.Tensor, page_Bn: torch.Tensor) -> torch.Tensor:
    """Entries `[B, G, n * T, E]` of pages, taken key head by key head so that they come to lie side by side in one copy."""
    groups = pages_NGTE.shape[1]
    index_BGn = page_Bn[:, None] * groups + torch.arange(groups, device=page_Bn.device)[:, None]
    return pages_NGTE.flatten(0, 1)[index_BGn].flatten(2, 3)


def _rotated(x_RHE: torch.Tensor, cos_R1E: torch.Tensor, sin_R1E: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding; dimension i pairs with i + E/2."""
    first, second = x_RHE.chunk(2, dim=-1)
    return x_RHE * cos_R1E + torch.cat([-second, first], dim=-1) * sin_R1E
