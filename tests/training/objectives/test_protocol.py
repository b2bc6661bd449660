"""The protocols, read off the classes: what fulfils them does so with the same names and parameters."""

import inspect

import pytest
import torch

from megatron_dmtd.data.batches.batch import Batch
from megatron_dmtd.data.batches.rows import Row
from megatron_dmtd.training.metrics import PhaseLoss
from megatron_dmtd.training.objectives import OBJECTIVES
from megatron_dmtd.training.objectives.protocol import LossSums, Microbatch, MicrobatchLoss, Objective
from tests.support.tiny import tiny_config


def members(protocol: type) -> dict[str, object]:
    return {name: value for name, value in vars(protocol).items() if not name.startswith("_") and name != "row_type"}


@pytest.mark.parametrize(
    ("protocol", "found"),
    [(LossSums, PhaseLoss(4)), (Microbatch, Batch), *((Objective, make(tiny_config())) for make in OBJECTIVES.values())],
    ids=str,
)
def test_a_class_that_fulfils_a_protocol_takes_the_same_parameters(protocol, found):
    wanted = members(protocol)
    assert wanted
    for name, member in wanted.items():
        assert hasattr(found, name), name
        if inspect.isfunction(member):
            parameters = [parameter for parameter in inspect.signature(member).parameters if parameter != "self"]
            theirs = [parameter for parameter in inspect.signature(getattr(found, name)).parameters if parameter != "self"]
            assert theirs == parameters, name


def test_an_objective_names_the_rows_that_it_reads():
    assert all(issubclass(make(tiny_config()).row_type, Row) for make in OBJECTIVES.values())


def test_the_loss_of_a_microbatch_keeps_its_graph_and_its_count_apart():
    weight = torch.tensor(2.0, requires_grad=True)
    made = MicrobatchLoss(loss=weight * 3, count=torch.tensor(4, dtype=torch.int32), sums=PhaseLoss(4))
    made.loss.backward()
    assert weight.grad == 3 and made.count == 4
