"""What joins the residual stream: outputs of attention and MLP, `Embed(x)`, and what a loop takes in again.

Hidden states are Megatron's [s, b, h]: see `streams`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_dmtd.architecture import LoopSpec, StepSpec
from megatron_dmtd.models.norm import unit, wide
from megatron_dmtd.models.scales import factor, scale_parameter


class LearnedStep(torch.nn.Module):
    """norm(a + |scale| * (b - a)) with a = norm(x), b = norm(y): in place of Megatron's x + y."""

    def __init__(self, step: StepSpec, config: Any) -> None:
        super().__init__()
        assert step.norm.kind == "unit" and config.hidden_dropout == 0.0, (step, config.hidden_dropout)
        self.step = step
        self.scale = scale_parameter(step.scale, config.hidden_size, config, is_split=False)

    def forward(self, is_training: bool, is_fused: bool) -> Callable[[Any, torch.Tensor, float], torch.Tensor]:
        """The function that Megatron's layer calls with (output, bias), the residual stream, and the dropout."""
        return self._joined

    def _joined(self, output_with_bias: Any, residual_sbh: torch.Tensor, dropout: float) -> torch.Tensor:
        output_sbh, bias = output_with_bias
        assert bias is None, "a bias of an output projection in a normalized layer"
        eps = self.step.norm.eps
        here, there = unit(residual_sbh, eps), unit(output_sbh, eps)
        length = factor(self.scale, self.step.scale).abs()
        return unit(torch.lerp(wide(here), wide(there), length).to(residual_sbh.dtype), eps)


def residual_part(step: StepSpec | None, config: Any) -> ModuleSpec | Callable[..., Any]:
    """How a part's output, and its bias if it has one, joins the residual stream; without `step` it is added."""
    return get_bias_dropout_add if step is None else ModuleSpec(module=LearnedStep, params={"step": step, "config": config})


def inject(hidden_sbh: torch.Tensor, token_embedding_sbh: torch.Tensor) -> torch.Tensor:
    """The input of the sequential pass (docs/method.md, section 1.2)."""
    return hidden_sbh + token_embedding_sbh


class ConcatLinear(torch.nn.Linear):
    """W [s; h]; every tensor-parallel rank has all of W. A new one gives the mean of the two, so the first loop takes in h."""

    def __init__(self, config: Any) -> None:
        super().__init__(2 * config.hidden_size, config.hidden_size, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input`: [s; h], twice the hidden size."""
        return super().forward(input)


class LoopEntry:
    """What a run of the looped layers takes in, and what leaves it, as `LoopSpec` says."""

    def __init__(self, loop: LoopSpec, linear: ConcatLinear | None) -> None:
        assert (linear is not None) == (loop.injection == "concat_linear"), loop
        assert loop.norm is None or loop.norm.kind == "unit", loop
        self._loop = loop
        self._linear = linear
        self._norm = None if loop.norm is None else functools.partial(unit, eps=loop.norm.eps)

    def enter(self, state_sbh: torch.Tensor | None, reached_sbh: torch.Tensor) -> torch.Tensor:
        """The input of a run: of the states that left the last one (None: this is the first), and those that reached the loop."""
        if self._loop.injection == "add":
            return reached_sbh if state_sbh is None else state_sbh + reached_sbh
        state = reached_sbh if state_sbh is None else state_sbh
        if self._linear is not None:
            return self._linear(torch.cat((state, reached_sbh), dim=-1))
        assert self._norm is not None
        return self._norm(state + reached_sbh)

    def leave(self, state_sbh: torch.Tensor) -> torch.Tensor:
        """What a run gives."""
        return state_sbh if self._norm is None else self._norm(state_sbh)
