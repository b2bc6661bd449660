"""Parallel DMTD out of transformers' own layers: docs/method.md, sections 1 to 5, on any decoder that transformers knows.

Imports nothing of the package. Slots are walked by `visibility`; each layer is called by itself with an explicit mask, so that
what transformers computes inside a layer (biases, norms, rotation, attention) is the reference; the order of the layers is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.oracles.visibility import Slot, may_read, walk

Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def _mask(slots: list[Slot], variant: str, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    sees = torch.tensor([[may_read(query, key, variant, window) for key in slots] for query in slots])
    return torch.zeros(sees.shape, dtype=dtype).masked_fill(~sees, float("-inf"))[None, None]


def _run(
    layers: Sequence[Any],
    hidden: torch.Tensor,
    slots: list[Slot],
    variant: str,
    windows: Sequence[Any],
    rotaries: Sequence[Rotary],
) -> torch.Tensor:
    position_ids = torch.tensor([[slot.position for slot in slots]])
    for layer, window, rotary in zip(layers, windows, rotaries, strict=True):
        hidden = layer(
            hidden,
            attention_mask=_mask(slots, variant, window, hidden.dtype),
            position_ids=position_ids,
            position_embeddings=rotary(hidden, position_ids),
        )
    return hidden


def teacher_forced_logits(
    model: Any,
    tokens: Sequence[int],
    documents: Sequence[int],
    *,
    variant: str,
    num_parallel_layers: int = 0,
    cycle_length: int = 4,
    mask_token_id: int = 0,
    windows: Sequence[int | None],
    rotaries: Sequence[Rotary] | None = None,
) -> torch.Tensor:
    """Logits [N, V] of one row of documents, by a model of transformers with eager attention; `vanilla` has no parallel layers.

    `windows` and `rotaries`: one for each layer; without rotaries all layers have the model's.
    """
    body, split = model.model, num_parallel_layers
    rotaries = rotaries or [body.rotary_emb] * len(body.layers)
    real, shadow = (walk(stream, documents, cycle_length) for stream in ("real", "shadow"))
    token_embedding = body.embed_tokens(torch.tensor([list(tokens)]))
    hidden = token_embedding
    if variant != "vanilla":
        shadow_ids = [token if slot.slot_in_cycle == 0 else mask_token_id for token, slot in zip(tokens, shadow, strict=True)]
        hidden = body.embed_tokens(torch.tensor([shadow_ids]))
        slots = shadow
        if variant.endswith("-refresh"):
            hidden, slots = torch.cat((token_embedding, hidden), dim=1), real + shadow
        hidden = _run(body.layers[:split], hidden, slots, variant, windows[:split], rotaries[:split])
        hidden = hidden[:, -len(shadow) :] + token_embedding
    hidden = _run(body.layers[split:], hidden, real, variant, windows[split:], rotaries[split:])
    return model.lm_head(body.norm(hidden))[0]
