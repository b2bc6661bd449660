"""Routing replay: the rollout's experts, weighted by the trainer's router (R3, arXiv:2510.11370)."""

from __future__ import annotations

import torch

from megatron_dmtd.errors import DataError


def replay_weights(router_logits: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Softmax of the live logits over the recorded experts, in their order. No gradient reaches the others.

    Args:
        router_logits: [T, E], of T tokens over E experts.
        indices: [T, k], integers; the experts that the rollout chose.

    Returns:
        [T, k].

    Raises:
        DataError: An index out of range or twice in a row, indices that are no integers, or shapes that do not fit.
    """
    _check(router_logits, indices)
    return torch.softmax(router_logits.gather(1, indices.long()), dim=1)


def _check(router_logits: torch.Tensor, indices: torch.Tensor) -> None:
    remedy = "pass the indices that this model's rollout recorded for these tokens and this layer"
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise DataError(found=f"expert indices of {indices.dtype}", required="integers", remedy=remedy)
    if router_logits.dim() != 2 or indices.dim() != 2 or router_logits.shape[0] != indices.shape[0]:
        raise DataError(
            found=f"router logits of shape {tuple(router_logits.shape)} with indices of {tuple(indices.shape)}",
            required="[T, E] and [T, k] of the same T tokens",
            remedy=remedy,
        )
    experts, wide = router_logits.shape[1], indices.long()
    outside = wide[(wide < 0) | (wide >= experts)]
    if outside.numel():
        raise DataError(found=f"expert {int(outside[0])}", required=f"experts 0 to {experts - 1}", remedy=remedy)
    ordered = wide.sort(dim=1).values
    twice = ordered[:, 1:][ordered[:, 1:] == ordered[:, :-1]]
    if twice.numel():
        raise DataError(found=f"expert {int(twice[0])} twice for one token", required="each expert once", remedy=remedy)
