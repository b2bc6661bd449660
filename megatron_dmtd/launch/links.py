"""Measure connections: transfers between neighbouring nodes, then one all-reduce over all ranks.

Neighbours come first because a failing pair points to two nodes, while a failing collective points to none.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_dmtd.platform.device import Platform

_BYTES_CPU, _BYTES_GPU = 2 << 20, 256 << 20
_REPEATS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One round trip between the first ranks of two nodes."""

    first: str
    second: str
    gb_s: float
    """One-way bandwidth; 0 if the transfer failed."""
    error: str = ""


def pair_rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs in which each node of a ring meets both its neighbours.

    >>> pair_rounds(4)
    [[(0, 1), (2, 3)], [(1, 2), (3, 0)]]
    """
    if num_nodes < 2:
        return []
    if num_nodes == 2:
        return [[(0, 1)]]
    edges = [(index, (index + 1) % num_nodes) for index in range(num_nodes)]
    closing = [[edges.pop()]] if num_nodes % 2 else []
    return [edges[0::2], edges[1::2], *closing]


def _buffer(platform: Platform) -> torch.Tensor:
    count = (_BYTES_GPU if platform.is_cuda else _BYTES_CPU) // 4
    return torch.ones(count, dtype=torch.float32, device=platform.device)


def measure_pairs(platform: Platform, *, hosts: list[str], ranks_per_node: int) -> list[Link]:
    """The links whose first end is this rank. Called on every rank; only the first rank of each node measures."""
    node, local = divmod(dist.get_rank(), ranks_per_node)
    if local != 0:
        return []
    links = []
    buffer_B = _buffer(platform)
    for pairs in pair_rounds(len(hosts)):
        for first, second in pairs:
            if node in (first, second):
                other = (second if node == first else first) * ranks_per_node
                link = _time_pair(platform, buffer_B, other, is_first=node == first)
                if node == first:
                    links.append(Link(first=hosts[first], second=hosts[second], gb_s=link[0], error=link[1]))
    return links


def _time_pair(platform: Platform, buffer_B: torch.Tensor, other: int, *, is_first: bool) -> tuple[float, str]:
    best_s = float("inf")
    try:
        for _ in range(_REPEATS):
            platform.synchronize()
            started = time.perf_counter()
            for sends in (is_first, not is_first):
                if sends:
                    dist.send(buffer_B, other)
                else:
                    dist.recv(buffer_B, other)
            platform.synchronize()
            best_s = min(best_s, time.perf_counter() - started)
    except RuntimeError as error:
        return 0.0, str(error).splitlines()[0][:200]
    return 2 * buffer_B.nbytes / best_s / 1e9, ""


def measure_all_reduce(platform: Platform) -> tuple[float, bool]:
    """Bus bandwidth of an all-reduce over all ranks in GB/s (best of several), and whether all sums were correct."""
    size = dist.get_world_size()
    best_s, is_right = float("inf"), True
    for _ in range(_REPEATS):
        buffer_B = _buffer(platform)
        dist.barrier()
        platform.synchronize()
        started = time.perf_counter()
        dist.all_reduce(buffer_B)
        platform.synchronize()
        best_s = min(best_s, time.perf_counter() - started)
        is_right = is_right and bool((buffer_B == size).all())
    return 2 * (size - 1) / size * buffer_B.nbytes / best_s / 1e9, is_right
