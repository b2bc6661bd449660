import pytest
import torch

from megatron_dmtd.errors import CapabilityError
from megatron_dmtd.inference.graphs import GraphRecorder, direct, require_cuda


def test_only_cuda_has_graphs():
    require_cuda(torch.device("cuda", 1))
    for take in (require_cuda, GraphRecorder):
        with pytest.raises(CapabilityError, match="CUDA graphs on cpu"):
            take(torch.device("cpu"))


def test_a_program_that_is_not_recorded_computes_each_time():
    numbers = torch.zeros(2)
    program = direct(lambda: numbers + 1)
    numbers += 5
    assert program().tolist() == [6, 6]


@pytest.mark.gpu
def test_a_recorded_program_computes_from_what_stands_at_its_addresses():
    numbers = torch.zeros(2, device="cuda")
    program = GraphRecorder(numbers.device)(lambda: numbers + 1)
    numbers += 5
    assert program().tolist() == [6, 6]
