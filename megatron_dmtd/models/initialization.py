"""Initial weights that depend only on the seed and the parameter's name.

Every layout of tensor, pipeline and data parallelism starts from the same model, bit for bit: each parameter's full matrix is
drawn from a generator seeded by (seed, global name), and each rank keeps its part.
"""

from __future__ import annotations

import hashlib
import math

import torch
from megatron.core import parallel_state

from megatron_dmtd.config import ModelConfig
from megatron_dmtd.models.model import INJECTION_KEY, OUTPUT_KEY, ROW_PARALLEL, TABLE_KEY, CycleModel


def global_name(name: str, model: CycleModel) -> str:
    """The name of a stage's parameter in the whole model: `decoder.layers.N` counts all layers, a tied head is the table."""
    if name == OUTPUT_KEY and model.placement.tied:
        return TABLE_KEY
    prefix = "decoder.layers."
    if not name.startswith(prefix):
        return name
    local, rest = name[len(prefix) :].split(".", 1)
    return f"{prefix}{model.stage.layers[int(local)]}.{rest}"


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _spread(name: str, model: ModelConfig) -> float:
    return model.init_std / math.sqrt(2 * model.num_layers) if name.endswith(ROW_PARALLEL) else model.init_std


def _full_matrix(name: str, shape: tuple[int, ...], *, seed: int, model: ModelConfig) -> torch.Tensor:
    matrix = torch.empty(shape, dtype=torch.float32).normal_(0.0, _spread(name, model), generator=_generator(seed, name))
    if name in (TABLE_KEY, OUTPUT_KEY):
        matrix[model.vocab_size :] = 0.0
    return matrix


def unit_dim(name: str, parameter: torch.Tensor) -> int | None:
    """The dimension of a normalized decoder's matrix along which its vectors have norm 1; None for what is no such matrix.

    It is the one of the hidden size, as in nGPT (arXiv 2410.01131, section 2.6, step 2): rows of the embedding table, the head,
    and the matrices that read the residual stream, columns of those that write to it. Tensor parallelism splits the other one.
    """
    if parameter.dim() != 2 or name == INJECTION_KEY:
        return None
    return 0 if name.endswith(ROW_PARALLEL) else 1


def _part(matrix: torch.Tensor, name: str, *, dim: int, rank: int, size: int) -> torch.Tensor:
    """A rank's part. The gate and up halves of the gated layer are split separately."""
    if name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(size, dim=dim)[rank] for half in matrix.chunk(2)])
    return matrix.chunk(size, dim=dim)[rank]


def fill_injection(weight: torch.Tensor) -> None:
    """Make the injection `concat_linear` the mean of the two states that it takes in; the weight is [X, 2X]."""
    half = 0.5 * torch.eye(weight.shape[0])
    weight.copy_(torch.cat((half, half), dim=1))


@torch.no_grad()
def initialize_weights(model: CycleModel, *, seed: int) -> None:
    """Fill a stage's parameters: matrices from a normal distribution, norms with ones, biases with zeros, scales as specified.

    Matrices of a normalized decoder have vectors of norm 1 (`unit_dim`).
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    for local, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(getattr(parameter, "initial_value", 0.0 if local.endswith(".bias") else 1.0))
            continue
        if local == INJECTION_KEY:
            fill_injection(parameter)
            continue
        name = global_name(local, model)
        dim = parameter.partition_dim
        shape = list(parameter.shape)
        shape[dim] *= size
        matrix = _full_matrix(name, tuple(shape), seed=seed, model=model.settings.model)
        vectors = unit_dim(name, parameter)
        if model.settings.model.normalized and vectors is not None:
            matrix = torch.nn.functional.normalize(matrix, dim=vectors)
        parameter.copy_(_part(matrix, name, dim=dim, rank=rank, size=size))
