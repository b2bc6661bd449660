"""Reinforcement learning: so far the exact functions on which it rests. None of them needs ranks, an engine or Ray."""

from megatron_dmtd.rl.advantages import group_advantages
from megatron_dmtd.rl.ratio import truncated_ratio
from megatron_dmtd.rl.routing import replay_weights
from megatron_dmtd.rl.staleness import fresh

__all__ = ["fresh", "group_advantages", "replay_weights", "truncated_ratio"]
