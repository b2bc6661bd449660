import datetime
import os

import pytest
import torch

from megatron_dmtd.config import Config
from megatron_dmtd.parallel.groups import (
    embedding_ranks,
    init_parallel,
    rank_of_environment,
    shut_down,
    world_size_of_environment,
)
from megatron_dmtd.parallel.placement import place
from megatron_dmtd.platform import prepare_megatron
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config


def test_a_process_without_a_launcher_is_alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert (rank_of_environment(), world_size_of_environment()) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (rank_of_environment(), world_size_of_environment()) == (3, 8)


def test_the_ranks_of_a_pipeline_that_hold_the_table_are_named_to_megatron():
    tied = place(tiny_config(model={"tie_word_embeddings": True}, parallel={"pipeline": 2}))
    assert [tied.table_ranks, embedding_ranks(tied)([5, 9])] == [(0, 1), [5, 9]]
    alone = place(tiny_config())
    assert embedding_ranks(alone)([7]) == [7]


def _groups(config: Config) -> tuple[list[list[int]], list[float]]:
    """Ranks of this rank's groups, and random numbers: the plain generator's, and those of tensor-parallel regions."""
    from megatron.core import parallel_state, tensor_parallel

    init_parallel(config, prepare_megatron())
    init = [
        torch.distributed.get_process_group_ranks(group)
        for group in (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_data_parallel_group(),
        )
    ]
    plain = torch.rand(1).item()
    with tensor_parallel.get_cuda_rng_tracker().fork():
        numbers = [plain, torch.rand(1).item()]
    shut_down()
    assert not torch.distributed.is_initialized() and not parallel_state.model_parallel_is_initialized()
    return init, numbers


@pytest.mark.multiprocess
def test_groups_and_random_states_follow_the_layout():
    found = run_ranks(4, _groups, tiny_config(parallel={"tensor": 2, "pipeline": 2}))
    assert [groups for groups, _ in found] == [
        [[0, 1], [0, 2], [0]],
        [[0, 1], [1, 3], [1]],
        [[2, 3], [0, 2], [2]],
        [[2, 3], [1, 3], [3]],
    ]
    numbers = [numbers for _, numbers in found]
    assert numbers[0][1] != numbers[1][1], "tensor-parallel ranks hold different shards"
    assert len({plain for plain, _ in numbers}) == 1


def _without_launcher(config: Config) -> tuple[int, datetime.timedelta]:
    """World size and timeout of a process that no launcher started. It leaves its groups twice."""
    torch.distributed.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    init_parallel(config, prepare_megatron())
    world_size = torch.distributed.get_world_size()
    timeout = torch.distributed.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    shut_down()
    shut_down()  # of nothing
    return world_size, timeout


@pytest.mark.multiprocess
def test_a_run_without_a_launcher_needs_no_address():
    config = tiny_config()
    assert run_ranks(1, _without_launcher, config) == [(1, datetime.timedelta(seconds=config.parallel.timeout_s))]
