"""Keeps matrices of a normalized decoder on the unit sphere: after each update their vectors are divided by their norms.

Which dimension of a matrix a vector lies along is said in `models/initialization.py`. The division follows the optimizer's update
of its fp32 copies and precedes the copy to the weights of the model and their all-gather, so all that it communicates is one sum
over the data-parallel ranks, of the squares of the vectors of which each rank holds a part. Vectors along the hidden size are
whole on each tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_dmtd.models.initialization import unit_dim
from megatron_dmtd.models.model import CycleModel


@dataclass(frozen=True, kw_only=True, slots=True)
class _Matrix:
    """One matrix, and the part of it that this rank updates."""

    shape: tuple[int, int]
    dim: int
    """The dimension along which its vectors lie."""
    part: torch.Tensor | None
    """A run of the flattened matrix in the optimizer's precision; None: other ranks update it all."""
    start: int
    """Where the part begins."""

    @property
    def num_vectors(self) -> int:
        """How many vectors it has."""
        return self.shape[1 - self.dim]

    def _pieces(self) -> Iterator[tuple[torch.Tensor, int, int]]:
        """The part as whole rows with, before and after them, parts of one: ([rows, columns], first row, first column)."""
        if self.part is None or not self.part.numel():
            return
        columns = self.shape[1]
        row, column = divmod(self.start, columns)
        head = min(-column % columns, self.part.numel())
        if head:
            yield self.part[:head].view(1, head), row, column
            row += 1
        whole = (self.part.numel() - head) // columns
        if whole:
            yield self.part[head : head + whole * columns].view(whole, columns), row, 0
        tail = head + whole * columns
        if tail < self.part.numel():
            yield self.part[tail:].view(1, -1), row + whole, 0

    def add_squares(self, squares: torch.Tensor) -> None:
        """Add each vector's sum of squares, as far as it is here."""
        for piece, row, column in self._pieces():
            first = row if self.dim == 1 else column
            found = piece.square().sum(self.dim)
            squares[first : first + len(found)] += found

    def divide(self, squares: torch.Tensor) -> None:
        """Divide each vector, as far as it is here; one of zeros stays."""
        inverse = torch.where(squares > 0, squares.rsqrt(), 0.0)
        for piece, row, column in self._pieces():
            first, size = (row, piece.shape[0]) if self.dim == 1 else (column, piece.shape[1])
            piece.mul_(inverse[first : first + size].unsqueeze(self.dim))


def _updated_parts(optimizer: Any) -> dict[torch.Tensor, tuple[torch.Tensor, int]]:
    """The model's parameter -> what the optimizer updates in its place, flat, and where that begins."""
    if isinstance(optimizer, DistributedOptimizer):
        pairs = [
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        ]
        return {
            parameter: (part, optimizer._get_model_param_range_map(parameter)["param"].start)
            for models, parts in pairs
            for group, own in zip(models, parts, strict=True)
            for parameter, part in zip(group, own, strict=True)
        }
    if hasattr(optimizer, "fp32_from_float16_groups"):
        groups = zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
        return {parameter: (part.view(-1), 0) for group, own in groups for parameter, part in zip(group, own, strict=True)}
    return {parameter: (parameter.data.view(-1), 0) for group in optimizer.param_groups for parameter in group["params"]}


def _matrices(optimizer: Any, models: Sequence[CycleModel]) -> list[_Matrix]:
    parts = _updated_parts(optimizer)
    found = []
    for model in models:
        for name, parameter in model.named_parameters():
            dim = unit_dim(name, parameter)
            if dim is None or not parameter.requires_grad:
                continue
            part, start = parts.get(parameter, (None, 0))
            shape = int(parameter.shape[0]), int(parameter.shape[1])
            found.append(_Matrix(shape=shape, dim=dim, part=part, start=start))
    return found


@torch.no_grad()
def _normalize(optimizer: Any, models: Sequence[CycleModel]) -> None:
    matrices = _matrices(optimizer, models)
    sizes = [matrix.num_vectors for matrix in matrices]
    total = torch.zeros(sum(sizes), dtype=torch.float32, device=next(models[0].parameters()).device)
    for matrix, squares in zip(matrices, total.split(sizes), strict=True):
        matrix.add_squares(squares)
    if isinstance(optimizer, DistributedOptimizer) and optimizer.data_parallel_group.size() > 1:
        torch.distributed.all_reduce(total, group=optimizer.data_parallel_group)
    for matrix, squares in zip(matrices, total.split(sizes), strict=True):
        matrix.divide(squares)


def keep_unit_weights(optimizer: Any, models: Sequence[CycleModel]) -> None:
    """Have every update of Megatron's chained `optimizer` end with unit vectors in the matrices of this rank's stages."""
    for part in optimizer.chained_optimizers:
        if not getattr(part, "is_stub_optimizer", False):
            part.optimizer.register_step_post_hook(lambda *_, part=part: _normalize(part, models))
