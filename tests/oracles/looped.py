"""An independent decoder whose middle layers run in a loop, with or without cycles, in float64: slow, obvious, a piece at a time.

It imports nothing of the package and nothing of transformers; torch serves as an array library. A text is taken in pieces, from
single tokens to all of it. Every (layer, loop) has a cache of its own (`per_loop`), or the loops of a layer share one and write
over each other's entries (`last_loop`). The four kinds of cycles follow docs/method.md, sections 6 to 10: at each cycle head the
real tokens of ended cycles are read again (history `real`), then the block `[head, MASK, ...]` runs through the parallel layers;
every token then runs alone through the sequential ones. The loop lies in the parallel layers, in the sequential ones, or there
are no parallel ones.

Layers are of one of two kinds: ordinary ones with RMSNorm, or normalized ones, whose states have norm 1 (nGPT, arXiv 2410.01131):

    n = unit(x); q, k, v, g = W n; q = scale * rotate(unit(q)), k = rotate(unit(k))
    y = unit(attention(q, k, v) * sigmoid(scale * g)); x = unit(n + |size| * (unit(W_o y) - n))
    m = unit(x); z = unit(silu(scale * gate(m)) * (scale * up(m))); x = unit(m + |size| * (unit(W_d z) - m))

Weights carry neutral names, such as `layers.0.attention.q.weight`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Weights = dict[str, Tensor]
UNIT_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Looped:
    """Shape of a model."""

    num_input_layers: int = 1
    num_recurrent_layers: int = 2
    num_output_layers: int = 1
    normalized: bool = True
    injection: str = "residual"
    windows: tuple[int | None, ...] = (None, 5, None, 7)
    second_theta_layers: tuple[int, ...] = (1, 3)
    theta: float = 10_000.0
    second_theta: float = 500.0
    hidden_size: int = 32
    intermediate_size: int = 24
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 8
    vocab_size: int = 61
    init_std: float = 0.03
    step_init: float = 0.3
    rms_eps: float = 1e-6
    num_parallel_layers: int = 0
    cycle_length: int = 4
    mask_token_id: int = 60

    @property
    def num_layers(self) -> int:
        """Layers with weights of their own."""
        return self.num_input_layers + self.num_recurrent_layers + self.num_output_layers

    def visits(self, num_loops: int) -> list[tuple[int, int]]:
        """(layer, loop from 1, or 0) in order."""
        first, last = self.num_input_layers, self.num_input_layers + self.num_recurrent_layers
        looped = [(layer, loop) for loop in range(1, num_loops + 1) for layer in range(first, last)]
        return [(layer, 0) for layer in range(first)] + looped + [(layer, 0) for layer in range(last, self.num_layers)]


def random_weights(shape: Looped, seed: int) -> Weights:
    """Float64 weights whose logits and attention spread widely."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, std: float) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64) * std

    def scale(size: int, mean: float, spread: float = 0.3) -> Tensor:
        return mean * (1 + normal(size, std=spread))

    hidden, inner = shape.hidden_size, shape.intermediate_size
    query, key = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    gain = 1.0 if shape.normalized else 1.5
    weights = {"embedding.weight": normal(shape.vocab_size, hidden, std=1.0)}
    for layer in range(shape.num_layers):
        name = f"layers.{layer}."
        for part, rows in (("q", query), ("k", key), ("v", key)):
            weights[f"{name}attention.{part}.weight"] = normal(rows, hidden, std=gain / math.sqrt(hidden))
        weights[f"{name}attention.o.weight"] = normal(hidden, query, std=gain / math.sqrt(query))
        for part in ("gate", "up"):
            weights[f"{name}mlp.{part}.weight"] = normal(inner, hidden, std=gain / math.sqrt(hidden))
        weights[f"{name}mlp.down.weight"] = normal(hidden, inner, std=gain / math.sqrt(inner))
        if shape.normalized:
            weights[f"{name}attention.g.weight"] = normal(query, hidden, std=1 / math.sqrt(hidden))
            for part, size in (("attention.q_scale", query), ("attention.g_scale", query)):
                weights[f"{name}{part}.weight"] = scale(size, shape.init_std)
            for part in ("attention_step", "mlp_step"):
                weights[f"{name}{part}.weight"] = scale(hidden, shape.init_std, 0.9)
            for part in ("mlp.gate_scale", "mlp.up_scale"):
                weights[f"{name}{part}.weight"] = scale(inner, 1.0)
        else:
            for part, size in (("attention_norm", hidden), ("mlp_norm", hidden)):
                weights[f"{name}{part}.weight"] = scale(size, 1.0, 0.2)
            for part in ("q_norm", "k_norm"):
                weights[f"{name}attention.{part}.weight"] = scale(shape.head_dim, 1.0, 0.2)
    if shape.injection == "concat_linear":
        weights["injection.weight"] = normal(hidden, 2 * hidden, std=1 / math.sqrt(2 * hidden))
    if shape.normalized:
        weights["head.weight"] = normal(shape.vocab_size, hidden, std=1.0)
        weights["logit_scale.weight"] = scale(shape.vocab_size, 2 * shape.init_std)
    else:
        weights["final_norm.weight"] = scale(hidden, 1.0, 0.2)
    return weights


def unit(x: Tensor) -> Tensor:
    """`x` over the last dimension's Euclidean norm."""
    return x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) + UNIT_EPS)


@dataclass
class Row:
    """One token, or one slot of a shadow block, on its way through the layers."""

    position: int
    hidden: Tensor
    is_stored: bool
    block: int | None = None
    """Head of its shadow block; None for a real token."""
    into_loop: Tensor | None = None


@dataclass
class LoopedDecoder:
    """One text that is read piece by piece. `history` and `block_attention` say nothing without parallel layers."""

    weights: Weights
    shape: Looped
    mode: str
    history: str = "real"
    block_attention: str = "causal"
    cache: dict[tuple[int, int], dict[int, tuple[Tensor, Tensor]]] = field(default_factory=dict)
    """By (layer, loop): keys and values `[G, D]` by position."""
    position: int = 0
    texts: list[int] = field(default_factory=list)
    num_refreshed: int = 0
    expiry: dict[int, int] = field(default_factory=dict)
    """Of tokens that are dropped, the first position that does not see them."""
    shadow: dict[int, Tensor] = field(default_factory=dict)
    """What the parallel layers gave, by position."""

    def take(self, token_ids: Sequence[int], num_loops: int) -> Tensor:
        """Logits `[N, V]` of the next N tokens, as one piece."""
        shape, start = self.shape, self.position
        self.texts += token_ids
        self.position = stop = start + len(token_ids)
        if shape.num_parallel_layers:
            self._parallel(start, stop, num_loops)
        rows = []
        for position in range(start, stop):
            hidden = self.weights["embedding.weight"][self.texts[position]]
            hidden = hidden + self.shadow[position] if shape.num_parallel_layers else hidden
            rows.append(Row(position, hidden, is_stored=True))
        self._through(rows, num_loops, is_parallel=False)
        return torch.stack([self._logits(row.hidden) for row in rows])

    def _parallel(self, start: int, stop: int, num_loops: int) -> None:
        shape, length = self.shape, self.shape.cycle_length
        heads = [position for position in range(start, stop) if position % length == 0]
        if not heads:
            return
        table, rows = self.weights["embedding.weight"], []
        if self.history == "real":
            for position in range(self.num_refreshed, heads[-1]):
                rows.append(Row(position, table[self.texts[position]], is_stored=True))
            self.num_refreshed = heads[-1]
        for head in heads:
            for offset in range(length):
                token = self.texts[head] if offset == 0 else shape.mask_token_id
                rows.append(Row(head + offset, table[token], is_stored=self.history == "shadow", block=head))
        self._through(rows, num_loops, is_parallel=True)
        self.shadow |= {row.position: row.hidden for row in rows if row.block is not None}

    def _through(self, rows: list[Row], num_loops: int, *, is_parallel: bool) -> None:
        shape = self.shape
        first, last = shape.num_input_layers, shape.num_input_layers + shape.num_recurrent_layers - 1
        for layer, loop in shape.visits(num_loops):
            if (layer < shape.num_parallel_layers) != is_parallel:
                continue
            if layer == first:
                for row in rows:
                    self._inject(row, loop)
            self._layer(rows, layer, loop if self.mode == "per_loop" else 0)
            if layer == last and shape.injection == "residual":
                for row in rows:
                    row.hidden = unit(row.hidden)

    def _inject(self, row: Row, loop: int) -> None:
        if loop == 1:
            row.into_loop = row.hidden
        before = row.into_loop
        if self.shape.injection == "residual":
            row.hidden = unit(row.hidden + before)
        elif self.shape.injection == "add":
            row.hidden = before if loop == 1 else row.hidden + before
        else:
            row.hidden = self.weights["injection.weight"] @ torch.cat([row.hidden, before])

    def _layer(self, rows: list[Row], layer: int, loop: int) -> None:
        cache = self.cache.setdefault((layer, loop), {})
        projected = [self._projected(row, layer) for row in rows]
        for row, (_, key, value) in zip(rows, projected):
            if row.is_stored:
                cache[row.position] = key, value
        for row, (query, _, _) in zip(rows, projected):
            pairs = {
                position: pair
                for position, pair in cache.items()
                if position <= row.position < self.expiry.get(position, math.inf)
            }
            if row.block is not None:
                seen = self.shape.cycle_length if self.block_attention == "bidirectional" else row.position - row.block + 1
                pairs = {position: pair for position, pair in pairs.items() if position < row.block}
                for other, (_, key, value) in zip(rows, projected):
                    if other.block == row.block and other.position < row.block + seen:
                        pairs[other.position] = key, value
            window = self.shape.windows[layer]
            near = [pair for position, pair in pairs.items() if window is None or row.position - position < window]
            row.hidden = self._rest(row.hidden, query, near, layer)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        if self.shape.normalized:
            return unit(x)
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.shape.rms_eps) * self.weights[f"{name}.weight"]

    def _projected(self, row: Row, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        name, width = f"layers.{layer}.attention.", self.shape.head_dim
        n = self._norm(row.hidden, f"layers.{layer}.attention_norm")
        query, key, value = ((self.weights[f"{name}{part}.weight"] @ n).view(-1, width) for part in ("q", "k", "v"))
        query = self._rotated(self._norm(query, f"{name}q_norm"), row.position, layer)
        key = self._rotated(self._norm(key, f"{name}k_norm"), row.position, layer)
        if self.shape.normalized:
            stored = self.weights[f"{name}q_scale.weight"]
            query = query * ((stored * math.sqrt(width) / self.shape.init_std) ** 2).view(-1, width)
        return query, key, value

    def _rotated(self, heads: Tensor, position: int, layer: int) -> Tensor:
        half = heads.shape[-1] // 2
        theta = self.shape.second_theta if layer in self.shape.second_theta_layers else self.shape.theta
        angle = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
        first, second = heads[:, :half], heads[:, half:]
        return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1)

    def _rest(self, x: Tensor, query: Tensor, pairs: list[tuple[Tensor, Tensor]], layer: int) -> Tensor:
        shape, name = self.shape, f"layers.{layer}."
        sharing = shape.num_attention_heads // shape.num_key_value_heads
        heads = []
        for head, own in enumerate(query):
            keys = torch.stack([key[head // sharing] for key, _ in pairs])
            values = torch.stack([value[head // sharing] for _, value in pairs])
            heads.append(torch.softmax(keys @ own / math.sqrt(shape.head_dim), 0) @ values)
        y = torch.cat(heads)
        if not shape.normalized:
            x = x + self.weights[f"{name}attention.o.weight"] @ y
            m = self._norm(x, f"{name}mlp_norm")
            gate, up = (self.weights[f"{name}mlp.{part}.weight"] @ m for part in ("gate", "up"))
            return x + self.weights[f"{name}mlp.down.weight"] @ (torch.nn.functional.silu(gate) * up)
        root, std = math.sqrt(shape.hidden_size), shape.init_std
        n = unit(x)
        gate = self.weights[f"{name}attention.g.weight"] @ n
        y = unit(y * torch.sigmoid(gate * (self.weights[f"{name}attention.g_scale.weight"] * math.sqrt(root) / std) ** 2))
        x = self._stepped(x, self.weights[f"{name}attention.o.weight"] @ y, f"{name}attention_step")
        m = unit(x)
        gate, up = (
            (self.weights[f"{name}mlp.{part}.weight"] @ m) * self.weights[f"{name}mlp.{part}_scale.weight"] * root
            for part in ("gate", "up")
        )
        z = unit(torch.nn.functional.silu(gate) * up)
        return self._stepped(x, self.weights[f"{name}mlp.down.weight"] @ z, f"{name}mlp_step")

    def _stepped(self, x: Tensor, out: Tensor, name: str) -> Tensor:
        size = (self.weights[f"{name}.weight"] * self.shape.step_init / self.shape.init_std).abs()
        return unit(unit(x) + size * (unit(out) - unit(x)))

    def _logits(self, hidden: Tensor) -> Tensor:
        x = self._norm(hidden, "final_norm")
        if not self.shape.normalized:
            return self.weights["embedding.weight"] @ x
        return (self.weights["head.weight"] @ x) * self.weights["logit_scale.weight"] / self.shape.init_std


def pieces_of(num_tokens: int, chunk: int) -> list[int]:
    """Lengths of the pieces of a prompt: exactly `chunk`, but the last."""
    return [min(chunk, num_tokens - start) for start in range(0, num_tokens, chunk)]
