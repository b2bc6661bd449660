"""Cache operations (drop, reposition), token by token in float64: slow, obvious, and written from docs/cache_operations.md alone.

Two formulations that share the arithmetic of one layer at one slot. `EditedDecoder` is literal: it feeds one token after the
other, and edits a cache at cycle heads. `masked_logits` computes all tokens at once under a mask of occurrences (token,
position). An ordinary decoder is the case of cycles of one token without parallel layers.

Imports nothing of the package; the arithmetic of a layer is that of the oracle next to it.

Shape legend: X hidden size, G key/value heads, D head width, V vocabulary, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.oracles.parallel_dmtd import Shape, Weights, embed, head_logits, query_key_value, rest_of_layer, rotate

#: Operations in JSON form, as requests give them.
Program = Sequence[dict]


class CacheState:
    """What of the raw tokens so far is active, and at which position, after the operations up to a cycle head."""

    def __init__(self, program: Program, cycle_length: int) -> None:
        self.waiting = [(-(-operation["after"] // cycle_length) * cycle_length, operation) for operation in program]
        self.position: dict[int, int] = {}
        """Of every active raw token, in their order."""
        self.next_position = 0
        self.num_repositions = 0
        """That changed something."""

    def begin(self, head: int) -> None:
        """Apply what takes effect before the raw token `head`, which begins a cycle."""
        while self.waiting and self.waiting[0][0] <= head:
            _, operation = self.waiting.pop(0)
            for begin, end in operation.get("drop", ()):
                for token in range(begin, end):
                    self.position.pop(token, None)
            if operation.get("reposition"):
                assert self.position, "nothing is active"
                after = {token: rank for rank, token in enumerate(sorted(self.position))}
                self.num_repositions += after != self.position or self.next_position != len(after)
                self.position, self.next_position = after, len(after)

    def append(self, token: int) -> int:
        """One more raw token. Returns its position."""
        self.position[token] = self.next_position
        self.next_position += 1
        return self.position[token]


def state_after(program: Program, cycle_length: int, num_tokens: int) -> CacheState:
    """The state after `num_tokens` tokens, and the operations whose cycle head is reached with them."""
    state = CacheState(program, cycle_length)
    for token in range(num_tokens):
        if token % cycle_length == 0:
            state.begin(token)
        state.append(token)
    if num_tokens % cycle_length == 0:
        state.begin(num_tokens)
    return state


class EditedDecoder:
    """One request: its layers' caches hold K as rotated at birth; reading rotates it back and to the position of now."""

    def __init__(
        self, weights: Weights, shape: Shape, *, history: str = "", block_attention: str = "", program: Program = ()
    ) -> None:
        self.weights, self.shape, self.history, self.block_attention = weights, shape, history, block_attention
        self.tau = shape.cycle_length if shape.num_parallel_layers else 1
        self.state = CacheState(program, self.tau)
        self.caches: list[dict[int, tuple[int, Tensor, Tensor]]] = [{} for _ in range(shape.num_layers)]
        """Of each layer, by raw token: position at birth, key, value."""
        self.tokens: list[int] = []
        self.shadow_hidden: list[Tensor] = []

    def feed(self, token_id: int) -> Tensor:
        """Logits `[V]` after one more token."""
        raw = len(self.tokens)
        if raw % self.tau == 0:
            if self.history == "real" and raw:
                self._refresh(raw - self.tau)
            self.state.begin(raw)
            if self.shape.num_parallel_layers:
                self._shadow_block(token_id, raw)
        self.tokens.append(token_id)
        hidden_X = embed(self.weights, token_id)
        if self.shape.num_parallel_layers:
            hidden_X = hidden_X + self.shadow_hidden[raw % self.tau]
        position = self.state.append(raw)
        for layer in range(self.shape.num_parallel_layers, self.shape.num_layers):
            hidden_X = self._real_slot(layer, hidden_X, raw, position)
        return head_logits(self.weights, self.shape, hidden_X)

    def _real_slot(self, layer: int, hidden_X: Tensor, raw: int, position: int) -> Tensor:
        query, key, value = query_key_value(self.weights, self.shape, layer, hidden_X, position)
        self.caches[layer][raw] = position, key, value
        seen = self._active(layer, [other for other in self.state.position if other <= raw])
        return rest_of_layer(self.weights, self.shape, layer, hidden_X, query, position, *seen)

    def _active(self, layer: int, tokens: list[int]) -> tuple[list[int], list[Tensor], list[Tensor]]:
        places = [self.state.position[token] for token in tokens]
        entries = [self.caches[layer][token] for token in tokens]
        keys = [moved(key, birth, place, self.shape) for (birth, key, _), place in zip(entries, places)]
        return places, keys, [value for _, _, value in entries]

    def _refresh(self, start: int) -> None:
        """The cycle that has just ended, before anything is edited: it sees what its own slots saw."""
        hidden = [embed(self.weights, token) for token in self.tokens[start : start + self.tau]]
        for layer in range(self.shape.num_parallel_layers):
            for offset in range(self.tau):
                raw = start + offset
                hidden[offset] = self._real_slot(layer, hidden[offset], raw, self.state.position[raw])

    def _shadow_block(self, head_id: int, start: int) -> None:
        first = self.state.next_position
        hidden = [embed(self.weights, token) for token in [head_id] + [self.shape.mask_token_id] * (self.tau - 1)]
        for layer in range(self.shape.num_parallel_layers):
            block = [query_key_value(self.weights, self.shape, layer, x_X, first + slot) for slot, x_X in enumerate(hidden)]
            places, keys, values = self._active(layer, list(self.state.position))
            after = []
            for slot, x_X in enumerate(hidden):
                width = slot + 1 if self.block_attention == "causal" else self.tau
                seen = (
                    places + list(range(first, first + width)),
                    keys + [key for _, key, _ in block[:width]],
                    values + [value for _, _, value in block[:width]],
                )
                after.append(rest_of_layer(self.weights, self.shape, layer, x_X, block[slot][0], first + slot, *seen))
            if self.history == "shadow":
                for slot in range(self.tau):
                    self.caches[layer][start + slot] = first + slot, block[slot][1], block[slot][2]
            hidden = after
        self.shadow_hidden = hidden


def moved(key_GD: Tensor, source: int, target: int, shape: Shape) -> Tensor:
    """A key rotated at `source`, rotated back and to `target`. The factor on cosines and sines stays what it was."""
    return rotate(rotate(key_GD, -source, shape), target, shape) / shape.rope_factor**2


def edited_logits(
    weights: Weights,
    shape: Shape,
    token_ids: Sequence[int],
    program: Program,
    *,
    history: str = "",
    block_attention: str = "",
) -> Tensor:
    """Logits `[N, V]`, token by token."""
    decoder = EditedDecoder(weights, shape, history=history, block_attention=block_attention, program=program)
    return torch.stack([decoder.feed(token) for token in token_ids])


# The same under a mask of occurrences.


class Plan:
    """Of every raw token its birth and expiry; of every token and stage its position."""

    def __init__(self, program: Program, cycle_length: int, num_tokens: int) -> None:
        state = CacheState(program, cycle_length)
        self.birth: list[int] = []
        self.stage: list[int] = []
        """Of each query."""
        self.expiry = [math.inf] * num_tokens
        """The first raw query that may not see the token."""
        self.position: list[dict[int, int]] = [{}]
        """Of each stage, of the tokens that some query of it may see."""
        for token in range(num_tokens):
            if token % cycle_length == 0:
                before = set(state.position)
                state.begin(token)
                for dropped in before - set(state.position):
                    self.expiry[dropped] = token
                if state.num_repositions >= len(self.position):
                    # One boundary may hold several: those between them are never seen.
                    self.position += [{}] * (state.num_repositions + 1 - len(self.position))
                    self.position[-1] = dict(state.position)
            self.birth.append(state.append(token))
            self.stage.append(state.num_repositions)
            self.position[-1][token] = self.birth[-1]

    def sees(self, query: int, token: int) -> bool:
        """Whether the token has not been dropped for the query."""
        return query < self.expiry[token]

    def place(self, query: int, token: int) -> int:
        """The token's position for the query."""
        return self.position[self.stage[query]][token]

    @property
    def occurrences(self) -> set[tuple[int, int]]:
        """(token, position) of everything that is read."""
        num_tokens = len(self.birth)
        return {(t, self.place(q, t)) for q in range(num_tokens) for t in range(q + 1) if self.sees(q, t)}

    @property
    def segments(self) -> list[tuple[int, int]]:
        """The queries, cut wherever the stage changes or something expires."""
        cuts = {q for q in range(1, len(self.stage)) if self.stage[q] != self.stage[q - 1] or q in self.expiry}
        starts = [0, *sorted(cuts)]
        return list(zip(starts, [*starts[1:], len(self.stage)]))


def masked_logits(
    weights: Weights,
    shape: Shape,
    token_ids: Sequence[int],
    program: Program,
    *,
    history: str = "",
    block_attention: str = "",
) -> Tensor:
    """Logits `[N, V]`: every layer once for all tokens."""
    tau = shape.cycle_length if shape.num_parallel_layers else 1
    num_slots = -(-len(token_ids) // tau) * tau
    plan = Plan(program, tau, num_slots)
    hidden = [embed(weights, token) for token in token_ids]
    if shape.num_parallel_layers:
        heads = [token if slot % tau == 0 else shape.mask_token_id for slot, token in enumerate(token_ids)]
        heads += [shape.mask_token_id] * (num_slots - len(token_ids))
        shadow = [embed(weights, token) for token in heads]
        real = list(hidden)
        for layer in range(shape.num_parallel_layers):
            real_qkv, shadow_qkv = (_projected(weights, shape, layer, plan, rows) for rows in (real, shadow))

            def seen_by(query: int, stores=(real_qkv, shadow_qkv)) -> tuple[list[int], list[Tensor], list[Tensor]]:
                own = query // tau
                last = query if block_attention == "causal" else own * tau + tau - 1
                past = stores[0] if history == "real" else stores[1]
                chosen = [(key, past[key]) for key in range(own * tau)]
                chosen += [(key, stores[1][key]) for key in range(own * tau, last + 1)]
                return _placed(shape, plan, query, chosen)

            shadow = [
                rest_of_layer(weights, shape, layer, x_X, shadow_qkv[query][0], plan.birth[query], *seen_by(query))
                for query, x_X in enumerate(shadow)
            ]
            real = _causal(weights, shape, layer, plan, real, real_qkv)
        hidden = [x_X + shadow[slot] for slot, x_X in enumerate(hidden)]
    for layer in range(shape.num_parallel_layers, shape.num_layers):
        hidden = _causal(weights, shape, layer, plan, hidden, _projected(weights, shape, layer, plan, hidden))
    return torch.stack([head_logits(weights, shape, x_X) for x_X in hidden])


def _projected(weights: Weights, shape: Shape, layer: int, plan: Plan, rows: list[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [query_key_value(weights, shape, layer, x_X, plan.birth[slot]) for slot, x_X in enumerate(rows)]


def _placed(
    shape: Shape, plan: Plan, query: int, chosen: list[tuple[int, tuple[Tensor, Tensor, Tensor]]]
) -> tuple[list[int], list[Tensor], list[Tensor]]:
    seen = [(token, qkv) for token, qkv in chosen if plan.sees(query, token)]
    places = [plan.place(query, token) for token, _ in seen]
    keys = [moved(qkv[1], plan.birth[token], place, shape) for (token, qkv), place in zip(seen, places)]
    return places, keys, [qkv[2] for _, qkv in seen]


def _causal(
    weights: Weights, shape: Shape, layer: int, plan: Plan, rows: list[Tensor], qkv: list[tuple[Tensor, Tensor, Tensor]]
) -> list[Tensor]:
    after = []
    for query, x_X in enumerate(rows):
        seen = _placed(shape, plan, query, [(token, qkv[token]) for token in range(query + 1)])
        after.append(rest_of_layer(weights, shape, layer, x_X, qkv[query][0], plan.birth[query], *seen))
    return after
