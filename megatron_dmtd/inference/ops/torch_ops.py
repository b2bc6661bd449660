"""The arithmetic of a pass in torch: any device, type, shape and number of rows. The native kernels are compared with it.

Shape legend: R rows of a pass, F rows that leave a visit, X hidden size, H query heads, G key/value heads, D head width, I
feed-forward width, B chunks of equally many rows, Q queries of such a chunk, K keys.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from megatron_dmtd.inference.ops.linear import Linear
from megatron_dmtd.inference.ops.protocol import LayerVisit
from megatron_dmtd.inference.passes import AttentionBatch, RowsInLayers
from megatron_dmtd.inference.weights import LayerWeights, Norm, Step


class TorchOps:
    """See `protocol.Ops`."""

    move = None

    def __init__(self, run: RowsInLayers) -> None:
        self.run = run

    def norm(self, x_RX: torch.Tensor, norm: Norm) -> torch.Tensor:
        """See `Ops`."""
        wide = x_RX.to(torch.promote_types(x_RX.dtype, torch.float32))
        if norm.weight is None:
            return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + norm.eps)).to(x_RX.dtype)
        return norm.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)).to(x_RX.dtype)

    def linear(self, x_RX: torch.Tensor, linear: Linear) -> torch.Tensor:
        """See `Ops`."""
        return linear.apply(x_RX)

    def linear_add(self, x: torch.Tensor, linear: Linear, residual_RX: torch.Tensor) -> torch.Tensor:
        """See `Ops`."""
        return residual_RX + linear.apply(x)

    def linear_step(self, x: torch.Tensor, linear: Linear, residual_RX: torch.Tensor, step: Step) -> torch.Tensor:
        """See `Ops`."""
        start_RX, end_RX = self.norm(residual_RX, step.norm), self.norm(linear.apply(x), step.norm)
        return self.norm(start_RX + step.size_X * (end_RX - start_RX), step.norm)

    def gate(self, gate_up: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        """See `Ops`."""
        if weights.gate_up_scale is not None:
            gate_up = gate_up * weights.gate_up_scale
        gate_RI, up_RI = gate_up.chunk(2, dim=-1)
        inner_RI = functional.silu(gate_RI) * up_RI
        return inner_RI if weights.inner_norm is None else self.norm(inner_RI, weights.inner_norm)

    def rotate_and_store(self, qkv: torch.Tensor, visit: LayerVisit) -> torch.Tensor:
        """See `Ops`."""
        weights, sizes, position_R = visit.weights, visit.attention, self.run.position_R
        q_RHD, k_RGD, v_RGD = _heads(qkv, visit)
        if weights.q_norm is not None and weights.k_norm is not None:
            q_RHD, k_RGD = self.norm(q_RHD, weights.q_norm), self.norm(k_RGD, weights.k_norm)
        cos_R1D, sin_R1D = visit.rotary.cos_ND[position_R][:, None], visit.rotary.sin_ND[position_R][:, None]
        q_RHD, k_RGD = _rotated(q_RHD, cos_R1D, sin_R1D), _rotated(k_RGD, cos_R1D, sin_R1D)
        if weights.query_scale is not None:
            q_RHD = q_RHD * weights.query_scale.view(q_RHD.shape[1:])
        row, page, offset = self.run.addresses(visit.group).stored
        visit.pages.write(page, offset, k_RGD[row], v_RGD[row])
        others = qkv[:, sizes.query_size + sizes.key_size :]
        return torch.cat([q_RHD.reshape(-1, sizes.query_size), k_RGD.reshape(-1, sizes.key_size), others], 1)

    def attend(self, qkv: torch.Tensor, visit: LayerVisit, *, final_only: bool) -> torch.Tensor:
        """See `Ops`."""
        attended, weights = self._attended(qkv, visit, final_only=final_only), visit.weights
        if weights.attention_gate is not None:
            gate = qkv[:, -visit.attention.query_size :]
            gate = gate[self.run.final_R] if final_only else gate
            attended = attended * torch.sigmoid(gate * weights.attention_gate)
        return attended if weights.output_norm is None else self.norm(attended, weights.output_norm)

    def _attended(self, qkv: torch.Tensor, visit: LayerVisit, *, final_only: bool) -> torch.Tensor:
        batches = self.run.addresses(visit.group).batches(final_only=final_only)
        parts = [_attended(_heads(qkv, visit), batch, visit) for batch in batches]
        if len(batches) == 1:
            return parts[0]
        attended = torch.empty_like(qkv[:, : visit.attention.query_size])
        for batch, part in zip(batches, parts):
            attended[batch.query_BQ.flatten()] = part
        return attended[self.run.final_R] if final_only else attended

    def head(self, hidden_FX: torch.Tensor, linear: Linear, scale: torch.Tensor | None) -> torch.Tensor:
        """See `Ops`."""
        logits_FV = linear.apply(hidden_FX)
        return logits_FV if scale is None else logits_FV * scale


Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _heads(qkv: torch.Tensor, visit: LayerVisit) -> Heads:
    """Q `[R, H, D]`, k and v `[R, G, D]`."""
    sizes = visit.attention
    width = sizes.query_size + 2 * sizes.key_size
    q, k, v = qkv[:, :width].split([sizes.query_size, sizes.key_size, sizes.key_size], dim=-1)
    return tuple(part.unflatten(-1, (-1, sizes.head_dim)) for part in (q, k, v))


def _attended(heads: Heads, batch: AttentionBatch, visit: LayerVisit) -> torch.Tensor:
    """The query heads that share a key head are laid along the sequence, so that no key is copied."""
    q_RHD, k_RGD, v_RGD = heads
    num_key_heads, head_dim = k_RGD.shape[1:]
    k_BGKD, v_BGKD = visit.pages.read(batch.page_BP)
    if batch.local_BN is not None:
        k_BGKD = torch.cat([k_BGKD, k_RGD[batch.local_BN].transpose(1, 2)], dim=2)
        v_BGKD = torch.cat([v_BGKD, v_RGD[batch.local_BN].transpose(1, 2)], dim=2)
    q = q_RHD[batch.query_BQ].unflatten(2, (num_key_heads, -1))  # [B, Q, G, H / G, D]
    sharing = q.shape[3]
    folded = q.permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = batch.mask_BQK.repeat(1, sharing, 1)[:, None]
    out = functional.scaled_dot_product_attention(folded, k_BGKD, v_BGKD, attn_mask=mask)
    rows = out.unflatten(2, (sharing, -1)).permute(0, 3, 1, 2, 4)
    return rows.reshape(-1, num_key_heads * sharing * head_dim)


def _rotated(x_RHD: torch.Tensor, cos_R1D: torch.Tensor, sin_R1D: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding; dimension i pairs with i + D / 2."""
    first, second = x_RHD.chunk(2, dim=-1)
    return x_RHD * cos_R1D + torch.cat([-second, first], dim=-1) * sin_R1D
