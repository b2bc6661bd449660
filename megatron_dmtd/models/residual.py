"""What is added to the residual stream: the outputs of attention and MLP, and `Embed(x)` where the sequential pass begins.

Hidden states are Megatron's [s, b, h]: see `streams`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add


def residual_add() -> Callable[..., Any]:
    """Megatron's addition of a part's output, and of its bias if it has one, to the residual stream."""
    return get_bias_dropout_add


def inject(hidden_sbh: torch.Tensor, token_embedding_sbh: torch.Tensor) -> torch.Tensor:
    """The input of the sequential pass (docs/method.md, section 1.2)."""
    return hidden_sbh + token_embedding_sbh
