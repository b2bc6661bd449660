"""The importance ratio between the trainer's policy and the one that the rollout really sampled from."""

from __future__ import annotations

import math

import torch

from megatron_dmtd.errors import ConfigError, DataError


@torch.no_grad()
def truncated_ratio(old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, bound: float) -> torch.Tensor:
    """min(exp(old - rollout), bound) per token, detached: a weight of the loss, apart from PPO's own clip.

    Args:
        old_logprobs: The trainer's, at the start of the step; any shape.
        rollout_logprobs: Those of the engine that sampled, in the same shape.
        bound: The largest ratio, above 0.

    Raises:
        ConfigError: `bound` is not above 0.
        DataError: The shapes differ.
    """
    if math.isnan(bound) or bound <= 0:
        raise ConfigError(found=f"bound {bound}", required="a number above 0", remedy="use 5, the default of TRACE")
    if old_logprobs.shape != rollout_logprobs.shape:
        raise DataError(
            found=f"log-probabilities of shapes {tuple(old_logprobs.shape)} and {tuple(rollout_logprobs.shape)}",
            required="one per token on both sides",
            remedy="compare the same tokens: pad or pack both sides alike",
        )
    return torch.exp(old_logprobs - rollout_logprobs).clamp(max=bound)
