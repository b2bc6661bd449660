"""An independent Parallel DMTD in float64: slow, obvious, and written from the specification (docs/method.md) alone.

It is what the fast paths are compared with, so it imports nothing of the package and nothing of transformers; torch serves as an
array library. Two separate code paths state the method twice: `teacher_forced_logits` follows docs/method.md, sections 1 to 5
(training: two streams and visibility rules over a whole document), `cycled_decode` follows docs/method.md, sections 6 to 10
(decoding: caches, refresh, shadow block, one token at a time). They share the arithmetic of one layer at one slot, and nothing
of who reads what.

Weights carry the names of Hugging Face's Qwen3. Layers, slots and visible keys are explicit Python loops: use tiny shapes.

Shape legend: X hidden size, H query heads, G key/value heads, D head width, V vocabulary, N slots or tokens, K keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Weights = dict[str, Tensor]

#: (history, block_attention) of the four models.
FOUR_VARIANTS = (("shadow", "causal"), ("real", "causal"), ("shadow", "bidirectional"), ("real", "bidirectional"))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape of a model; field names as in Hugging Face's Qwen3, then the four numbers of the method."""

    num_layers: int = 4
    num_parallel_layers: int = 2
    hidden_size: int = 32
    intermediate_size: int = 48
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 8
    vocab_size: int = 61
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    qk_norm: bool = True
    tie_word_embeddings: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    windows: tuple[int | None, ...] = ()
    """Keys that a query of each layer sees at most, itself included; None: all. Empty: no layer has a window."""
    frequencies: tuple[float, ...] = ()
    """Radians per position of each pair of dimensions, where they are not those of `rope_theta`."""
    rope_factor: float = 1.0
    """Factor on cosines and sines."""
    cycle_length: int = 4
    mask_token_id: int = 60

    def __post_init__(self) -> None:
        assert 0 <= self.num_parallel_layers <= self.num_layers, self
        assert self.num_attention_heads % self.num_key_value_heads == 0, self
        assert self.head_dim % 2 == 0, self
        assert 0 <= self.mask_token_id < self.vocab_size, self


def random_weights(shape: Shape, seed: int, scale: float = 2.0) -> Weights:
    """Float64 weights by their Qwen3 names; a larger `scale` spreads logits and attention wider (2: logits of std 2 or more)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, std: float) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64) * std

    def linear(rows: int, columns: int) -> Tensor:
        return normal(rows, columns, std=scale / math.sqrt(columns))

    def norm(size: int) -> Tensor:
        return 1.0 + normal(size, std=0.2)

    hidden, inner, head = shape.hidden_size, shape.intermediate_size, shape.head_dim
    query_width, key_width = shape.num_attention_heads * head, shape.num_key_value_heads * head
    weights = {"model.embed_tokens.weight": normal(shape.vocab_size, hidden, std=scale / 2)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        weights[prefix + "self_attn.q_proj.weight"] = linear(query_width, hidden)
        weights[prefix + "self_attn.k_proj.weight"] = linear(key_width, hidden)
        weights[prefix + "self_attn.v_proj.weight"] = linear(key_width, hidden)
        weights[prefix + "self_attn.o_proj.weight"] = linear(hidden, query_width)
        if shape.qk_norm:
            weights[prefix + "self_attn.q_norm.weight"] = norm(head)
            weights[prefix + "self_attn.k_norm.weight"] = norm(head)
        weights[prefix + "mlp.gate_proj.weight"] = linear(inner, hidden)
        weights[prefix + "mlp.up_proj.weight"] = linear(inner, hidden)
        weights[prefix + "mlp.down_proj.weight"] = linear(hidden, inner)
        weights[prefix + "input_layernorm.weight"] = norm(hidden)
        weights[prefix + "post_attention_layernorm.weight"] = norm(hidden)
        if shape.qkv_bias:
            for name, width in (("q", query_width), ("k", key_width), ("v", key_width)):
                weights[f"{prefix}self_attn.{name}_proj.bias"] = normal(width, std=scale / 2)
        if shape.output_bias:
            weights[prefix + "self_attn.o_proj.bias"] = normal(hidden, std=scale / 2)
    weights["model.norm.weight"] = norm(hidden)
    if not shape.tie_word_embeddings:
        weights["lm_head.weight"] = linear(shape.vocab_size, hidden)
    return weights


# One layer at one slot: the only arithmetic that the two paths share.


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension."""
    return x / torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight


def rotate(heads: Tensor, position: int, shape: Shape) -> Tensor:
    """Rotary embedding of `heads [heads, D]` at `position`; dimension i pairs with i + D/2."""
    half = heads.shape[-1] // 2
    frequency = shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    if shape.frequencies:
        frequency = torch.tensor(shape.frequencies, dtype=torch.float64)
    cos, sin = shape.rope_factor * torch.cos(position * frequency), shape.rope_factor * torch.sin(position * frequency)
    first, second = heads[:, :half], heads[:, half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def query_key_value(weights: Weights, shape: Shape, layer: int, hidden_X: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
    """`q [H, D]`, `k [G, D]`, `v [G, D]` of one slot at one layer."""
    prefix = f"model.layers.{layer}."
    x_X = rms_norm(hidden_X, weights[prefix + "input_layernorm.weight"], shape.rms_norm_eps)
    query = project(weights, prefix + "self_attn.q_proj", x_X).view(shape.num_attention_heads, shape.head_dim)
    key = project(weights, prefix + "self_attn.k_proj", x_X).view(shape.num_key_value_heads, shape.head_dim)
    value = project(weights, prefix + "self_attn.v_proj", x_X).view(shape.num_key_value_heads, shape.head_dim)
    if shape.qk_norm:
        query = rms_norm(query, weights[prefix + "self_attn.q_norm.weight"], shape.rms_norm_eps)
        key = rms_norm(key, weights[prefix + "self_attn.k_norm.weight"], shape.rms_norm_eps)
    return rotate(query, position, shape), rotate(key, position, shape), value


def project(weights: Weights, name: str, x_X: Tensor) -> Tensor:
    """One linear layer, with its bias where the weights have one."""
    product = weights[name + ".weight"] @ x_X
    return product + weights[name + ".bias"] if name + ".bias" in weights else product


def inside_window(
    shape: Shape, layer: int, position: int, key_positions: Sequence[int], keys: list[Tensor], values: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Of the keys and values that the method shows a query, those that the layer's window leaves."""
    window = shape.windows[layer] if shape.windows else None
    near = [index for index, key in enumerate(key_positions) if window is None or position - key < window]
    return [keys[index] for index in near], [values[index] for index in near]


def rest_of_layer(
    weights: Weights,
    shape: Shape,
    layer: int,
    hidden_X: Tensor,
    query: Tensor,
    position: int,
    key_positions: Sequence[int],
    keys: list[Tensor],
    values: list[Tensor],
) -> Tensor:
    """The slot's hidden state after the layer, when its query at `position` may read `keys` and `values` at `key_positions`."""
    assert keys and len(keys) == len(values) == len(key_positions)
    keys, values = inside_window(shape, layer, position, key_positions, keys, values)
    prefix = f"model.layers.{layer}."
    queries_per_group = shape.num_attention_heads // shape.num_key_value_heads
    heads = []
    for head in range(shape.num_attention_heads):
        group = head // queries_per_group
        key_KD = torch.stack([key[group] for key in keys])
        value_KD = torch.stack([value[group] for value in values])
        probability_K = torch.softmax(key_KD @ query[head] / math.sqrt(shape.head_dim), dim=0)
        heads.append(probability_K @ value_KD)
    hidden_X = hidden_X + project(weights, prefix + "self_attn.o_proj", torch.cat(heads))
    x_X = rms_norm(hidden_X, weights[prefix + "post_attention_layernorm.weight"], shape.rms_norm_eps)
    gate = torch.nn.functional.silu(weights[prefix + "mlp.gate_proj.weight"] @ x_X)
    inner = gate * (weights[prefix + "mlp.up_proj.weight"] @ x_X)
    return hidden_X + weights[prefix + "mlp.down_proj.weight"] @ inner


def embed(weights: Weights, token_id: int) -> Tensor:
    """Embedding `[X]` of one token."""
    return weights["model.embed_tokens.weight"][token_id]


def head_logits(weights: Weights, shape: Shape, hidden_X: Tensor) -> Tensor:
    """Next-token logits `[V]`."""
    x_X = rms_norm(hidden_X, weights["model.norm.weight"], shape.rms_norm_eps)
    name = "model.embed_tokens.weight" if shape.tie_word_embeddings else "lm_head.weight"
    return weights[name] @ x_X


# Path 1: the training forward pass; docs/method.md, sections 1 to 5.


def shadow_document(shape: Shape, token_ids: Sequence[int], *, complete_last_cycle: bool = True) -> list[int]:
    """`[x0, M, M, M] [x4, M, M, M] ...`: the shadow input of one document, its last cycle completed with MASK slots."""
    shadow = [token if position % shape.cycle_length == 0 else shape.mask_token_id for position, token in enumerate(token_ids)]
    while complete_last_cycle and len(shadow) % shape.cycle_length != 0:
        shadow.append(shape.mask_token_id)
    return shadow


def _causal_layers(weights: Weights, shape: Shape, layers: range, hidden: list[Tensor]) -> list[Tensor]:
    """`hidden` of every slot after ordinary causal layers."""
    for layer in layers:
        qkv = [query_key_value(weights, shape, layer, x_X, position) for position, x_X in enumerate(hidden)]
        after = []
        for position, x_X in enumerate(hidden):
            seen = [key for key in range(len(hidden)) if key <= position]
            keys, values = [qkv[key][1] for key in seen], [qkv[key][2] for key in seen]
            after.append(rest_of_layer(weights, shape, layer, x_X, qkv[position][0], position, seen, keys, values))
        hidden = after
    return hidden


def _norefresh_sees(shape: Shape, block_attention: str, query_position: int, key_position: int) -> bool:
    """What a shadow query reads when earlier cycles stay shadow (docs/method.md, sections 2 and 4)."""
    causal_history = key_position <= query_position
    if block_attention == "causal":
        return causal_history
    same_cycle = query_position // shape.cycle_length == key_position // shape.cycle_length
    return same_cycle or causal_history


def _refresh_sees(shape: Shape, block_attention: str, query_position: int, key_is_real: bool, key_position: int) -> bool:
    """What a shadow query reads when earlier cycles are real (docs/method.md, sections 3.2 and 5)."""
    query_cycle, key_cycle = query_position // shape.cycle_length, key_position // shape.cycle_length
    real_visible = key_is_real and key_cycle < query_cycle
    shadow_visible = not key_is_real and key_cycle == query_cycle
    if block_attention == "causal":
        shadow_visible = shadow_visible and key_position <= query_position
    return real_visible or shadow_visible


def _norefresh_parallel(weights: Weights, shape: Shape, block_attention: str, shadow: list[Tensor]) -> list[Tensor]:
    for layer in range(shape.num_parallel_layers):
        qkv = [query_key_value(weights, shape, layer, x_X, position) for position, x_X in enumerate(shadow)]
        after = []
        for position, x_X in enumerate(shadow):
            seen = [key for key in range(len(shadow)) if _norefresh_sees(shape, block_attention, position, key)]
            keys, values = [qkv[key][1] for key in seen], [qkv[key][2] for key in seen]
            after.append(rest_of_layer(weights, shape, layer, x_X, qkv[position][0], position, seen, keys, values))
        shadow = after
    return shadow


def _refresh_parallel(
    weights: Weights, shape: Shape, block_attention: str, real: list[Tensor], shadow: list[Tensor]
) -> list[Tensor]:
    for layer in range(shape.num_parallel_layers):
        real_qkv = [query_key_value(weights, shape, layer, x_X, position) for position, x_X in enumerate(real)]
        shadow_qkv = [query_key_value(weights, shape, layer, x_X, position) for position, x_X in enumerate(shadow)]
        slots = [(True, position, kv) for position, kv in enumerate(real_qkv)]
        slots += [(False, position, kv) for position, kv in enumerate(shadow_qkv)]
        after = []
        for position, x_X in enumerate(shadow):
            seen = [(key, kv) for is_real, key, kv in slots if _refresh_sees(shape, block_attention, position, is_real, key)]
            places, keys, values = [key for key, _ in seen], [kv[1] for _, kv in seen], [kv[2] for _, kv in seen]
            after.append(rest_of_layer(weights, shape, layer, x_X, shadow_qkv[position][0], position, places, keys, values))
        shadow = after
        real = _causal_layers(weights, shape, range(layer, layer + 1), real)
    return shadow


def parallel_hidden(
    weights: Weights,
    shape: Shape,
    *,
    history: str,
    block_attention: str,
    token_ids: Sequence[int],
    complete_last_cycle: bool = True,
) -> Tensor:
    """`[N, X]`: what the parallel layers hand to the sequential ones at each of the document's n tokens.

    `complete_last_cycle=False` leaves a trailing block short, which decoding never does: only to show that it matters.
    """
    shadow_ids = shadow_document(shape, token_ids, complete_last_cycle=complete_last_cycle)
    shadow = [embed(weights, token) for token in shadow_ids]
    if history == "shadow":
        hidden = _norefresh_parallel(weights, shape, block_attention, shadow)
    else:
        assert history == "real", history
        hidden = _refresh_parallel(weights, shape, block_attention, [embed(weights, token) for token in token_ids], shadow)
    return torch.stack(hidden[: len(token_ids)])


def teacher_forced_logits(
    weights: Weights,
    shape: Shape,
    *,
    history: str,
    block_attention: str,
    token_ids: Sequence[int],
    complete_last_cycle: bool = True,
) -> Tensor:
    """Logits `[N, V]` of one document of n tokens, as the training forward pass gives them (docs/method.md, sections 1 to 5)."""
    assert block_attention in ("causal", "bidirectional"), block_attention
    from_parallel_NX = parallel_hidden(
        weights,
        shape,
        history=history,
        block_attention=block_attention,
        token_ids=token_ids,
        complete_last_cycle=complete_last_cycle,
    )
    hidden = [embed(weights, token) + from_parallel_NX[position] for position, token in enumerate(token_ids)]
    hidden = _causal_layers(weights, shape, range(shape.num_parallel_layers, shape.num_layers), hidden)
    return torch.stack([head_logits(weights, shape, x_X) for x_X in hidden])


def vanilla_logits(weights: Weights, shape: Shape, token_ids: Sequence[int]) -> Tensor:
    """Logits `[N, V]` of the same weights as an ordinary decoder."""
    hidden = _causal_layers(weights, shape, range(shape.num_layers), [embed(weights, token) for token in token_ids])
    return torch.stack([head_logits(weights, shape, x_X) for x_X in hidden])


# Path 2: cycled decoding; docs/method.md, sections 6 to 10.


@dataclass(kw_only=True)
class LayerCache:
    """`C_P[l]` or `C_S[l]`: K and V of one layer, one entry per slot, with what each entry is."""

    positions: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def append(self, *, position: int, kind: str, key: Tensor, value: Tensor) -> None:
        """Add one slot at the end; `kind` is "real" or "shadow"."""
        assert kind in ("real", "shadow"), kind
        assert position == len(self.positions), "a cache is dense: no gap, no repeat"
        self.positions.append(position)
        self.kinds.append(kind)
        self.keys.append(key)
        self.values.append(value)


@dataclass(frozen=True, kw_only=True)
class LayerSnapshot:
    """A copy of one layer's cache: `positions` and `kinds` of its T entries, `keys [K, G, D]` and `values [K, G, D]`."""

    positions: tuple[int, ...]
    kinds: tuple[str, ...]
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, kw_only=True)
class CycleSnapshot:
    """Every persistent cache at the end of a cycle, by layer index; the last one may be of an unfinished cycle."""

    cycle: int
    parallel: dict[int, LayerSnapshot]
    sequential: dict[int, LayerSnapshot]


@dataclass(frozen=True, kw_only=True)
class CycledTrace:
    """What a decoding run showed."""

    first_position: int
    """Position of the first row of `logits`: `prompt_length - 1`."""
    logits: Tensor
    """`[N - first_position, V]`."""
    snapshots: tuple[CycleSnapshot, ...]
    """One for each cycle from that of `first_position` on."""


class CycledDecoder:
    """One request (docs/method.md, sections 6 to 10): refresh and shadow are two literal passes, then one token at a time."""

    def __init__(self, weights: Weights, shape: Shape, *, history: str, block_attention: str) -> None:
        assert (history, block_attention) in FOUR_VARIANTS, (history, block_attention)
        self.weights, self.shape = weights, shape
        self.history, self.block_attention = history, block_attention
        self.parallel_cache = {layer: LayerCache() for layer in range(shape.num_parallel_layers)}
        self.sequential_cache = {layer: LayerCache() for layer in range(shape.num_parallel_layers, shape.num_layers)}
        self.position = 0
        self.saved_hidden: list[Tensor] = []
        self.current_cycle: list[int] = []
        self.to_refresh: list[int] = []

    def prefill(self, token_ids: Sequence[int]) -> None:
        """Take whole cycles of a prompt. Afterwards the next cycle is the first generated one: nothing waits for a refresh."""
        tau = self.shape.cycle_length
        assert self.position == 0 and len(token_ids) % tau == 0
        if self.history == "real":
            self._refresh(list(token_ids), start=0)
        for start in range(0, len(token_ids), tau):
            # The cache already holds the whole prompt here: a block reads the part before it.
            shadow_hidden = self._shadow_block(token_ids[start], start=start)
            for slot in range(tau):
                self._sequential_step(token_ids[start + slot], shadow_hidden[slot])

    def feed(self, token_id: int) -> Tensor:
        """Logits `[V]` after one more real token; a token at a cycle head runs the parallel layers first."""
        tau = self.shape.cycle_length
        if not self.saved_hidden:
            if self.history == "real" and self.to_refresh:
                self._refresh(self.to_refresh, start=self.position - tau)
            self.to_refresh = []
            self.saved_hidden = self._shadow_block(token_id, start=self.position)
        logits_V = self._sequential_step(token_id, self.saved_hidden[len(self.current_cycle)])
        self.current_cycle.append(token_id)
        if len(self.current_cycle) == tau:
            self.to_refresh, self.current_cycle, self.saved_hidden = self.current_cycle, [], []
        return logits_V

    def snapshot(self) -> CycleSnapshot:
        """A copy of every cache, labelled with the cycle of the last token fed."""

        def copy(cache: LayerCache) -> LayerSnapshot:
            empty = torch.empty(0, self.shape.num_key_value_heads, self.shape.head_dim, dtype=torch.float64)
            keys = torch.stack(cache.keys) if cache.keys else empty
            values = torch.stack(cache.values) if cache.values else empty
            return LayerSnapshot(positions=tuple(cache.positions), kinds=tuple(cache.kinds), keys=keys, values=values)

        return CycleSnapshot(
            cycle=(self.position - 1) // self.shape.cycle_length,
            parallel={layer: copy(cache) for layer, cache in self.parallel_cache.items()},
            sequential={layer: copy(cache) for layer, cache in self.sequential_cache.items()},
        )

    def _refresh(self, token_ids: list[int], *, start: int) -> None:
        """Step A of docs/method.md, section 10: real tokens go through causally; each layer appends its own real K and V."""
        hidden = [embed(self.weights, token) for token in token_ids]
        for layer, cache in self.parallel_cache.items():
            after = []
            for offset, x_X in enumerate(hidden):
                query, key, value = query_key_value(self.weights, self.shape, layer, x_X, start + offset)
                cache.append(position=start + offset, kind="real", key=key, value=value)
                seen = (list(range(start + offset + 1)), cache.keys, cache.values)
                after.append(rest_of_layer(self.weights, self.shape, layer, x_X, query, start + offset, *seen))
            hidden = after

    def _shadow_block(self, head_id: int, *, start: int) -> list[Tensor]:
        """Step B of docs/method.md, section 10: `[head, M, M, M]` on each layer's history and the block's own K and V."""
        tau = self.shape.cycle_length
        hidden = [embed(self.weights, token) for token in [head_id] + [self.shape.mask_token_id] * (tau - 1)]
        for layer, cache in self.parallel_cache.items():
            block = [query_key_value(self.weights, self.shape, layer, x_X, start + slot) for slot, x_X in enumerate(hidden)]
            block_keys, block_values = [kv[1] for kv in block], [kv[2] for kv in block]
            past_keys, past_values = cache.keys[:start], cache.values[:start]
            assert len(past_keys) == start, "the history must be complete up to the block"
            after = []
            for slot, x_X in enumerate(hidden):
                width = slot + 1 if self.block_attention == "causal" else tau
                keys, values = past_keys + block_keys[:width], past_values + block_values[:width]
                seen = (list(range(start + width)), keys, values)
                after.append(rest_of_layer(self.weights, self.shape, layer, x_X, block[slot][0], start + slot, *seen))
            if self.history == "shadow":
                for slot in range(tau):
                    cache.append(position=start + slot, kind="shadow", key=block_keys[slot], value=block_values[slot])
            hidden = after
        return hidden

    def _sequential_step(self, token_id: int, shadow_X: Tensor) -> Tensor:
        """Step C: one real token through the sequential layers; each appends one real K and V."""
        hidden_X = embed(self.weights, token_id) + shadow_X
        for layer, cache in self.sequential_cache.items():
            query, key, value = query_key_value(self.weights, self.shape, layer, hidden_X, self.position)
            cache.append(position=self.position, kind="real", key=key, value=value)
            seen = (cache.positions, cache.keys, cache.values)
            hidden_X = rest_of_layer(self.weights, self.shape, layer, hidden_X, query, self.position, *seen)
        self.position += 1
        return head_logits(self.weights, self.shape, hidden_X)


def _start(
    weights: Weights, shape: Shape, *, history: str, block_attention: str, token_ids: Sequence[int], prompt_length: int
) -> tuple[CycledDecoder, Tensor]:
    """A decoder that has read `token_ids[:prompt_length]`, and its last logits `[V]`."""
    assert 1 <= prompt_length <= len(token_ids)
    decoder = CycledDecoder(weights, shape, history=history, block_attention=block_attention)
    whole = (prompt_length - 1) // shape.cycle_length * shape.cycle_length
    decoder.prefill(token_ids[:whole])
    for position in range(whole, prompt_length):
        logits_V = decoder.feed(token_ids[position])
    return decoder, logits_V


def cycled_decode(
    weights: Weights, shape: Shape, *, history: str, block_attention: str, token_ids: Sequence[int], prompt_length: int
) -> CycledTrace:
    """Feed one document token by token, after a prompt whose earlier whole cycles are processed at once.

    See docs/method.md, sections 6 to 10. The cycle that holds the prompt's last token is the first generated cycle. Logits start
    at position `prompt_length - 1`.
    """
    decoder, logits_V = _start(
        weights,
        shape,
        history=history,
        block_attention=block_attention,
        token_ids=token_ids,
        prompt_length=prompt_length,
    )
    logits, snapshots = [logits_V], []
    for token_id in token_ids[prompt_length:]:
        if not decoder.saved_hidden:
            snapshots.append(decoder.snapshot())
        logits.append(decoder.feed(token_id))
    snapshots.append(decoder.snapshot())
    return CycledTrace(first_position=prompt_length - 1, logits=torch.stack(logits), snapshots=tuple(snapshots))


def cycled_greedy(
    weights: Weights, shape: Shape, *, history: str, block_attention: str, prompt_ids: Sequence[int], max_new_tokens: int
) -> list[int]:
    """The `max_new_tokens` ids that greedy cycled decoding appends to a prompt; nothing stops it early."""
    decoder, logits_V = _start(
        weights,
        shape,
        history=history,
        block_attention=block_attention,
        token_ids=prompt_ids,
        prompt_length=len(prompt_ids),
    )
    new_ids: list[int] = []
    while len(new_ids) < max_new_tokens:
        if new_ids:
            logits_V = decoder.feed(new_ids[-1])
        new_ids.append(int(logits_V.argmax()))
    return new_ids
