"""One transformer layer of a Qwen3-like decoder, for slots of any kind.

The layers do not depend on cycles, streams or caches: each pass brings its visibility and its key store. The file travels with
every exported model as remote code.

Shape legend: B rows, N slots of a row, Q queries, K keys, H query heads, G key/value heads, M = H / G query heads per
key/value head, D head width, A = D / 2 frequencies, X hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .configuration_dmtd_qwen3 import DMTDQwen3Config, refusal
from .dmtd_slots import Visibility

#: Types of rotary embedding whose frequencies do not depend on the sequence length.
ROPE_TYPES = ("default", "linear", "yarn", "llama3")
#: (layer index, K [B, N, G, D], V of the current slots) -> (K, V) [B, K, G, D] of every slot that attention may read
KeyValueExchange = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """What the layers of one pass share: rotary angles of its slots, visibility, and where K and V go."""

    cos_BND: torch.Tensor
    sin_BND: torch.Tensor
    visibility: Visibility
    exchange: KeyValueExchange
    elsewhere: dict[torch.device, Pass] = dataclasses.field(default_factory=dict, repr=False)
    """Copies of this pass on the other devices that hold layers."""

    def on(self, device: torch.device) -> Pass:
        """The same pass on `device`. A `device_map` of transformers spreads layers over devices, but moves only hidden states."""
        if self.cos_BND.device == device:
            return self
        if device not in self.elsewhere:
            self.elsewhere[device] = Pass(
                cos_BND=self.cos_BND.to(device),
                sin_BND=self.sin_BND.to(device),
                visibility=self.visibility.on(device),
                exchange=self.exchange,
            )
        return self.elsewhere[device]


class DMTDQwen3RMSNorm(nn.Module):
    """RMSNorm, computed in fp32, or in the weights' type if that is wider."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class DMTDQwen3MLP(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, config: DMTDQwen3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def rotate(x_BNHD: torch.Tensor, cos_BND: torch.Tensor, sin_BND: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding; dimension i pairs with i + D/2."""
    first, second = x_BNHD.chunk(2, dim=-1)
    return x_BNHD * cos_BND[:, :, None] + torch.cat([-second, first], dim=-1) * sin_BND[:, :, None]


def attend(
    q_BQHD: torch.Tensor,
    k_BKGD: torch.Tensor,
    v_BKGD: torch.Tensor,
    visibility: Visibility,
    *,
    first_query: int,
    window: int | None,
) -> torch.Tensor:
    """Attention of the pass's queries from `first_query` on, over the keys that they may see.

    Query heads that share a key head are laid out along the sequence, so that no key is copied.
    """
    batch, _, heads, size = q_BQHD.shape
    groups = k_BKGD.shape[2]
    k_BGKD, v_BGKD = k_BKGD.transpose(1, 2), v_BKGD.transpose(1, 2)
    outputs = []
    for start, stop, mask_BQK in visibility.blocks(first_query, window):
        block = q_BQHD[:, start - first_query : stop - first_query].unflatten(2, (groups, heads // groups))
        folded = block.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, G, M * Q, D]
        mask = mask_BQK.repeat(1, heads // groups, 1)[:, None]
        out = functional.scaled_dot_product_attention(folded, k_BGKD, v_BGKD, attn_mask=mask)
        outputs.append(out.unflatten(2, (heads // groups, stop - start)).permute(0, 3, 1, 2, 4))
    return torch.cat(outputs, dim=1).reshape(batch, -1, heads, size)


class DMTDQwen3Attention(nn.Module):
    """Grouped-query attention; the pass brings the mask and the key store."""

    def __init__(self, config: DMTDQwen3Config, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.window = config.layer_window(layer)
        assert config.num_key_value_heads is not None  # set by Qwen3Config
        query_size, key_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_output_bias)
        self.has_qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = DMTDQwen3RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = DMTDQwen3RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x_BNX: torch.Tensor, run: Pass, *, num_key_only: int) -> torch.Tensor:
        q_BQHD = self.q_proj(x_BNX[:, num_key_only:]).unflatten(-1, (-1, self.head_dim))
        k_BNGD = self.k_proj(x_BNX).unflatten(-1, (-1, self.head_dim))
        v_BNGD = self.v_proj(x_BNX).unflatten(-1, (-1, self.head_dim))
        if self.has_qk_norm:
            q_BQHD, k_BNGD = self.q_norm(q_BQHD), self.k_norm(k_BNGD)
        q_BQHD = rotate(q_BQHD, run.cos_BND[:, num_key_only:], run.sin_BND[:, num_key_only:])
        k_BNGD = rotate(k_BNGD, run.cos_BND, run.sin_BND)
        k_BKGD, v_BKGD = run.exchange(self.layer, k_BNGD, v_BNGD)
        out_BQHD = attend(q_BQHD, k_BKGD, v_BKGD, run.visibility, first_query=num_key_only, window=self.window)
        return self.o_proj(out_BQHD.flatten(2))


class DMTDQwen3DecoderLayer(GradientCheckpointingLayer):
    """One transformer layer.

    With gradient checkpointing, transformers' base class computes it again in the backward pass. `run` gives it the same then:
    only a pass with a cache writes anything, and such a pass is not checkpointed (`DMTDQwen3Model.forward`).
    """

    def __init__(self, config: DMTDQwen3Config, layer: int) -> None:
        super().__init__()
        self.self_attn = DMTDQwen3Attention(config, layer)
        self.mlp = DMTDQwen3MLP(config)
        self.input_layernorm = DMTDQwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DMTDQwen3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_BNX: torch.Tensor, run: Pass, *, num_key_only: int = 0) -> torch.Tensor:
        """Only K and V are computed for the first `num_key_only` slots; the hidden states of the others are returned."""
        run = run.on(hidden_BNX.device)
        attended_BQX = self.self_attn(self.input_layernorm(hidden_BNX), run, num_key_only=num_key_only)
        hidden_BQX = hidden_BNX[:, num_key_only:] + attended_BQX
        return hidden_BQX + self.mlp(self.post_attention_layernorm(hidden_BQX))


class RotaryAngles:
    """Cosines and sines of positions. Not a module: frequencies follow from the configuration and are never loaded."""

    def __init__(self, config: DMTDQwen3Config) -> None:
        rope = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
        self.config = config
        self.rope_type = str(rope.get("rope_type", rope.get("type", "default")))
        self.theta = float(rope["rope_theta"] if "rope_theta" in rope else config.rope_theta)  # noqa: SIM401 - 5.x lacks the latter
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise refusal(
                found=f"partial_rotary_factor={rope['partial_rotary_factor']}",
                required="1.0: whole heads are rotated",
                remedy="leave it out",
            )
        if self.rope_type not in ROPE_TYPES:
            raise refusal(
                found=f"rope_type={self.rope_type!r}",
                required=f"one of {ROPE_TYPES}: others change with the length of the text, and cached keys do not",
                remedy="choose another rope_type",
            )
        self._inverse: dict[tuple[torch.device, torch.dtype], tuple[torch.Tensor, float]] = {}

    def _frequencies(self, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
        key = (device, dtype)
        if key not in self._inverse:
            if self.rope_type == "default":
                exponent_A = torch.arange(0, self.config.head_dim, 2, dtype=torch.int64).to(dtype) / self.config.head_dim
                self._inverse[key] = (1.0 / (self.theta**exponent_A)).to(device), 1.0
            else:
                inverse_A, scale = ROPE_INIT_FUNCTIONS[self.rope_type](self.config, torch.device("cpu"))
                self._inverse[key] = inverse_A.to(device=device, dtype=dtype), scale
        return self._inverse[key]

    def __call__(self, position_BN: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """`(cos, sin)`, each `[B, N, D]`, computed in fp32 or wider and returned in `dtype`."""
        wide = torch.promote_types(dtype, torch.float32)
        inverse_A, scale = self._frequencies(position_BN.device, wide)
        angle_BND = (position_BN[:, :, None].to(wide) * inverse_A).repeat(1, 1, 2)
        return (angle_BND.cos() * scale).to(dtype), (angle_BND.sin() * scale).to(dtype)
