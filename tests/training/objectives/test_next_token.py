"""The loss of packed documents: summed over the slots with a target, in fp32, and counted."""

import numpy as np
import torch

from megatron_dmtd.data.batches.rows import Row
from megatron_dmtd.training.objectives import OBJECTIVES, make_objective
from megatron_dmtd.training.objectives.next_token import NextToken
from tests.support.tiny import tiny_config


def _row(num_slots: int = 8) -> Row:
    ids_N = np.arange(num_slots, dtype=np.int64)
    return Row(
        tokens_N=ids_N,
        labels_N=ids_N + 1,
        loss_mask_N=np.array([1, 1, 0, 1, 0, 0, 1, 0], dtype=np.float32),
        positions_N=ids_N,
        document_lengths=(num_slots,),
    )


def test_it_is_what_a_configuration_means_by_default() -> None:
    assert isinstance(make_objective(tiny_config()), NextToken)
    assert OBJECTIVES["next_token"] is NextToken


def test_loss_and_count_are_those_of_the_slots_with_a_target() -> None:
    objective = NextToken(tiny_config())
    batch = objective.make_batch([_row(), _row()])
    output = torch.arange(16, dtype=torch.bfloat16).view(2, 8).requires_grad_()
    found = objective.loss(batch, output)
    assert found.loss.dtype == torch.float32
    assert found.loss.item() == (0 + 1 + 3 + 6) + (8 + 9 + 11 + 14)
    assert found.count.dtype == torch.int32 and found.count.item() == 8
    found.loss.backward()
    assert torch.equal(output.grad, batch.loss_mask_BN.to(torch.bfloat16))
    assert found.sums.num_targets == 8
    assert found.sums.values()["loss"] == 52 / 8
    assert found.sums.values()["loss_phase_3"] == (3 + 11) / 2


def test_the_model_gets_the_batch() -> None:
    objective = NextToken(tiny_config())
    batch = objective.make_batch([_row()])
    seen = {}

    def model(*tensors, **named):
        seen["tensors"], seen["named"] = tensors, named
        return tensors[0]

    assert objective.forward(model, batch) is batch.tokens_BN
    assert all(map(torch.equal, seen["tensors"], (batch.tokens_BN, batch.positions_BN, batch.labels_BN)))
    assert seen["named"] == {"document_lengths": ((8,),)}


def test_it_remembers_nothing() -> None:
    objective = NextToken(tiny_config())
    objective.load_state_dict(objective.state_dict())
    assert objective.state_dict() == {}
