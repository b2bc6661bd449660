"""After each update the matrices of a normalized decoder consist of unit vectors: in the model and in fp32 copies of it.

Level: norms within 1e-6 in fp32, within bf16's rounding in weights of that type; one process's weights within fp32 tolerance.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_dmtd.config import Config
from tests.models.looped import DORY
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, with_settings


def trained(config: Config, steps: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], set[float]]:
    """This rank's parameters, and what the optimizer keeps of its own, after some steps; weight decays of its groups."""
    from megatron_dmtd.models.initialization import global_name
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training import rows, start
    from megatron_dmtd.training.step import train_step

    run = start.prepare(config, prepare_megatron())
    iterator = rows.microbatches(run, rows.open_corpus(config, config.data.train), first_row=0)
    for _ in range(steps):
        assert train_step(run, iterator).is_applied
    named = [(global_name(name, model), value) for model in run.models for name, value in model.named_parameters()]
    found = {name: value.detach().float().clone() for name, value in named}
    (part,) = run.optimizer.chained_optimizers
    masters = {}
    if config.training.precision == "bf16" and not config.parallel.distributed_optimizer:
        masters = {name: value.main_param.detach().clone() for name, value in named}
    return found, masters, {group["weight_decay"] for group in part.optimizer.param_groups}


def _config(corpus: tuple[str, str], **sections: Any) -> Config:
    model = DORY | sections.pop("model", {})
    config = tiny_config("vanilla", model=model, **sections)
    return with_settings(config, data={"train": (corpus[0],)})


def _largest_error(name: str, matrix: torch.Tensor) -> float:
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        rows = matrix.norm(dim=1)
        return float((rows[rows > 0] - 1).abs().max())
    return float((matrix.norm(dim=0 if name.endswith(("proj.weight", "fc2.weight")) else 1) - 1).abs().max())


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("size", "parallel", "precision"),
    [
        (1, {}, "fp32"),
        (3, {}, "fp32"),
        (2, {"tensor": 2, "sequence_parallel": True}, "fp32"),
        (2, {"distributed_optimizer": False}, "fp32"),
        (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}, "fp32"),
        (2, {}, "bf16"),
        (1, {"distributed_optimizer": False}, "bf16"),
    ],
    ids=["one", "data-3", "tensor", "plain", "overlapped", "bf16", "plain-bf16"],
)
def test_matrices_stay_on_the_unit_sphere(size: int, parallel: dict[str, Any], precision: str, corpus: tuple[str, str]) -> None:
    batch = {"precision": precision, "global_batch_size": 6}
    found = run_ranks(size, trained, _config(corpus, parallel=parallel, training=batch), 3)
    allowed = 1e-6 if precision == "fp32" else 4e-3
    for parameters, masters, decays in found:
        matrices = {name: tensor for name, tensor in parameters.items() if tensor.dim() == 2}
        assert len(matrices) == 2 + 5 * 5 and decays == {0.0}
        errors = {name: _largest_error(name, matrix) for name, matrix in matrices.items()}
        assert max(errors.values()) < allowed, errors
        assert all(_largest_error(name, value) < 1e-6 for name, value in masters.items() if value.dim() == 2)
        assert bool(masters) == (precision == "bf16" and "distributed_optimizer" in parallel)


@pytest.mark.multiprocess
def test_shards_whose_ends_cut_vectors_give_the_weights_of_one_process(corpus: tuple[str, str]) -> None:
    batch = {"global_batch_size": 6}
    one = run_ranks(1, trained, _config(corpus, training=batch), 4)[0][0]
    for parameters, _, _ in run_ranks(3, trained, _config(corpus, training=batch), 4):
        for name, expected in one.items():
            torch.testing.assert_close(parameters[name], expected, atol=2e-5, rtol=0)


@pytest.mark.multiprocess
def test_new_weights_are_unit_vectors_and_the_setting_leaves_them_alone_later(corpus: tuple[str, str]) -> None:
    new = run_ranks(1, trained, _config(corpus), 0)[0][0]
    assert max(_largest_error(name, matrix) for name, matrix in new.items() if matrix.dim() == 2) < 1e-6
    free, _, decays = run_ranks(1, trained, _config(corpus, optimizer={"unit_weights": False}), 3)[0]
    assert max(_largest_error(name, matrix) for name, matrix in free.items() if matrix.dim() == 2) > 1e-4
    assert 0.1 in decays


@pytest.mark.parametrize("start", range(0, 24, 5))
@pytest.mark.parametrize("size", [0, 1, 3, 7, 12])
@pytest.mark.parametrize("dim", [0, 1])
def test_any_run_of_a_matrix_counts_in_its_vectors(start: int, size: int, dim: int) -> None:
    from megatron_dmtd.training.unit_weights import _Matrix

    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    kept = torch.zeros(24)
    kept[start : start + size] = 1
    part = whole.flatten()[start : start + size].clone()
    matrix = _Matrix(shape=(6, 4), dim=dim, part=part, start=start)
    squares = torch.zeros(matrix.num_vectors)
    matrix.add_squares(squares)
    torch.testing.assert_close(squares, (whole.square() * kept.view(6, 4)).sum(dim))
    matrix.divide(whole.square().sum(dim))
    expected = (whole / whole.norm(dim=dim, keepdim=True)).flatten()[start : start + size]
    torch.testing.assert_close(part, expected)
