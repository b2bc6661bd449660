"""Advantages of GRPO: how much better an answer is than the others to the same prompt."""

from __future__ import annotations

import torch

from megatron_dmtd.errors import ConfigError, DataError

EPSILON = 1e-4


@torch.no_grad()
def group_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """(r - mean) / (std + 1e-4) in consecutive groups; std is that of a sample (N - 1), as in TRL and verl.

    Args:
        rewards: [N], real or integer, the answers to one prompt next to each other.
        group_size: Answers per prompt.

    Returns:
        [N], without gradient, in the type of real rewards, else float32; computed in float64. A group of equal rewards, or of
        one, gets 0.

    Raises:
        ConfigError: `group_size` is below 1.
        DataError: N is no multiple of `group_size`; NaN or infinity among the rewards; more than one axis.
    """
    if group_size < 1:
        raise ConfigError(found=f"group_size {group_size}", required="at least 1", remedy="set it to the answers per prompt")
    if rewards.dim() != 1 or rewards.shape[0] % group_size:
        raise DataError(
            found=f"rewards of shape {tuple(rewards.shape)} for groups of {group_size}",
            required="one axis, whose length is a multiple of group_size",
            remedy="pass whole groups: all answers to a prompt, one after another",
        )
    if not torch.isfinite(rewards).all():
        raise DataError(
            found="NaN or infinity among the rewards",
            required="finite rewards",
            remedy="leave failed samples out together with their group, or give them a reward",
        )
    groups = rewards.double().view(-1, group_size)
    if group_size == 1 or not rewards.numel():
        advantages = torch.zeros_like(groups)
    else:
        deviation = groups - groups.mean(dim=1, keepdim=True)
        equal = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
        advantages = torch.where(equal, 0.0, deviation / (groups.std(dim=1, keepdim=True) + EPSILON))
    return advantages.flatten().to(rewards.dtype if rewards.is_floating_point() else torch.float32)
