"""Copies of the embedding table on one rank; on several, whole runs show it (`training/test_layouts.py`)."""

from types import SimpleNamespace

import pytest
import torch

from megatron_dmtd.models import gradients
from megatron_dmtd.models.gradients import sum_table_gradients
from megatron_dmtd.models.model import CycleModel


def stage(gradient: list[float] | None, *, stages=(0, 2), ranks=(0,), is_trained=True):
    table = None
    if gradient is not None:
        table = torch.nn.Parameter(torch.zeros(len(gradient)), requires_grad=is_trained)
        table.main_grad = torch.tensor(gradient)
    placement = SimpleNamespace(table_stages=stages, table_ranks=ranks)
    return SimpleNamespace(placement=placement, table=table, shared_embedding_or_output_weight=lambda: table)


def test_every_copy_gets_the_sum_of_all():
    first, without, second = stage([1.0, 2.0]), stage(None), stage([10.0, 20.0])
    sum_table_gradients([first, without, second])
    assert first.table.main_grad.tolist() == second.table.main_grad.tolist() == [11.0, 22.0]


@pytest.mark.parametrize("changes", [{"stages": (0,)}, {"is_trained": False}])
def test_a_single_table_and_a_frozen_one_are_left_alone(changes):
    only = stage([1.0, 2.0], **changes)
    sum_table_gradients([only])
    assert only.table.main_grad.tolist() == [1.0, 2.0]
    sum_table_gradients([stage(None)])


def test_ranks_that_hold_copies_add_up_over_their_group(monkeypatch):
    reduced = []

    def all_reduce(tensor, *, group):
        reduced.append(group)
        tensor += 100.0  # the other rank's

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(gradients.parallel_state, "get_embedding_group", lambda: "the ranks with a table")
    first, second = stage([1.0], ranks=(0, 1)), stage([2.0], ranks=(0, 1))
    sum_table_gradients([first, second])
    assert first.table.main_grad.tolist() == second.table.main_grad.tolist() == [103.0]
    assert reduced == ["the ranks with a table"]


def test_a_model_is_found_inside_its_wrappers():
    model = CycleModel.__new__(CycleModel)
    torch.nn.Module.__init__(model)
    wrapped = torch.nn.Module()
    wrapped.module = torch.nn.Module()
    wrapped.module.module = model
    assert gradients._unwrapped(wrapped) is model and gradients._unwrapped(model) is model
