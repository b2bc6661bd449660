"""Adam with the interface of Apex's FusedAdam, on torch's own fused kernel.

Megatron's distributed optimizer saves and loads state only for optimizers that keep `step` in their parameter groups, as those of
Apex and Transformer Engine do; torch's keeps it per parameter, and its checkpoints cannot be loaded (megatron-core 0.16.1). This
class is used if neither library is installed. It can be removed once Megatron accepts torch's layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW (or Adam with L2 if `adam_w_mode` is false) that counts steps per parameter group."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Closures are not supported."""
        assert closure is None, "FusedAdam takes no closure"
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None and param.numel() > 0]
            if not params:
                continue
            group["step"] = group.get("step", 0) + 1
            states = [self._state_of(param) for param in params]
            beta1, beta2 = group["betas"]
            kernel(
                params,
                [param.grad for param in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                # The kernel expects steps that already count this update.
                [torch.tensor(float(group["step"]), device=param.device) for param in params],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )

    def _state_of(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        return state
