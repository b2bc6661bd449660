"""The weights of a model that is spread over several ranks: as one stream, which a running training passes to an engine, and
from a directory, whose weights a training starts with.

Every rank of the model calls `stream_ranks` and iterates over it together with the others: each tensor is gathered from the
tensor-parallel ranks of the stage that holds it and sent to the other stages. Every rank sees the whole stream; memory grows by
one whole tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state

from megatron_dmtd.models.initialization import global_name
from megatron_dmtd.models.model import CycleModel
from megatron_dmtd.weights.hf_directory import HFWeights
from megatron_dmtd.weights.megatron_names import EMBEDDING, HEAD, rules
from megatron_dmtd.weights.specs import TensorSpec
from megatron_dmtd.weights.streams import WeightStream

#: Megatron splits the gate and up halves separately.
_HALVES = ("linear_fc1.weight", "linear_fc1.bias")


def stream_ranks(models: Sequence[CycleModel]) -> WeightStream:
    """The weights of a model, given this rank's stages. Collective over tensor- and pipeline-parallel ranks.

    Tensors have the type of the model's parameters. They are new memory, apart from those that this rank holds whole, which must
    not be kept beyond the next training step.
    """
    local = {global_name(name, model): tensor for model in models for name, tensor in model.named_parameters()}
    owners, own_rank = _owners(local), parallel_state.get_pipeline_model_parallel_rank()
    device = next(iter(local.values())).device
    for rule in rules(models[0].schedule.decoder):
        owner, spec = owners[rule.megatron_name]
        if owner == own_rank:
            whole = _whole(local[rule.megatron_name], rule.megatron_name)
        else:
            whole = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        yield from rule.split(_sent(whole, owner))


@torch.no_grad()
def load_directory(models: Sequence[CycleModel], directory: str | Path) -> None:
    """Fill this rank's stages with the weights of a Hugging Face directory, converted to the type of the parameters.

    Not collective: each rank reads the tensors of which it holds a part; memory grows by one whole tensor. Raises as `HFWeights`.
    """
    decoder = models[0].schedule.decoder
    weights, table = HFWeights(directory, decoder), {rule.megatron_name: rule for rule in rules(decoder)}
    for model in models:
        for local_name, parameter in model.named_parameters():
            name = global_name(local_name, model)
            rule = table[EMBEDDING if name == HEAD and decoder.tie_word_embeddings else name]
            whole = torch.empty(rule.megatron_shapes[0], dtype=weights.stored[rule.hf[0][0]].dtype)
            parameter.copy_(_share(rule.join(weights.files.read_into, whole), parameter, name))


def _share(whole: torch.Tensor, parameter: torch.Tensor, name: str) -> torch.Tensor:
    """The part of a whole tensor that this tensor-parallel rank holds: the inverse of `_whole`."""
    dim, size = _split_dim(parameter), parallel_state.get_tensor_model_parallel_world_size()
    if dim is None or size == 1:
        return whole
    rank = parallel_state.get_tensor_model_parallel_rank()
    if not name.endswith(_HALVES):
        return whole.chunk(size, dim=dim)[rank]
    return torch.cat([half.chunk(size, dim=dim)[rank] for half in whole.chunk(2, dim=dim)], dim=dim)


def _owners(local: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, TensorSpec]]:
    """Name -> the first pipeline rank that holds it, and the whole tensor's spec. The same on every rank."""
    own = {name: _whole_spec(tensor) for name, tensor in local.items()}
    stages: list[dict[str, TensorSpec]] = [{} for _ in range(parallel_state.get_pipeline_model_parallel_world_size())]
    torch.distributed.all_gather_object(stages, own, group=parallel_state.get_pipeline_model_parallel_group())
    found: dict[str, tuple[int, TensorSpec]] = {}
    for rank, names in enumerate(stages):
        for name, spec in names.items():
            found.setdefault(name, (rank, spec))
    return found


def _split_dim(parameter: torch.Tensor) -> int | None:
    """The dimension along which tensor-parallel ranks split a parameter; None if each holds the whole tensor."""
    return int(parameter.partition_dim) if getattr(parameter, "tensor_model_parallel", False) else None  # type: ignore[attr-defined]


def _whole_spec(parameter: torch.Tensor) -> TensorSpec:
    shape, dim = list(parameter.shape), _split_dim(parameter)
    if dim is not None:
        shape[dim] *= parallel_state.get_tensor_model_parallel_world_size()
    return TensorSpec(tuple(shape), parameter.dtype)


@torch.no_grad()
def _whole(parameter: torch.Tensor, name: str) -> torch.Tensor:
    """A parameter of this stage, gathered from its tensor-parallel ranks."""
    dim, size = _split_dim(parameter), parallel_state.get_tensor_model_parallel_world_size()
    if dim is None or size == 1:
        return parameter.detach()
    parts = [torch.empty_like(parameter) for _ in range(size)]
    torch.distributed.all_gather(parts, parameter.detach().contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    if not name.endswith(_HALVES):
        return torch.cat(parts, dim=dim)
    return torch.cat([torch.cat(halves, dim=dim) for halves in zip(*(part.chunk(2, dim=dim) for part in parts), strict=True)])


def _sent(whole: torch.Tensor, owner: int) -> torch.Tensor:
    """The tensor on every stage, from the pipeline rank that holds it."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        group = parallel_state.get_pipeline_model_parallel_group()
        whole = whole.contiguous()
        torch.distributed.broadcast(whole, src=torch.distributed.get_global_rank(group, owner), group=group)
    return whole
