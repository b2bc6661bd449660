from pathlib import Path

import pytest
import torch

from megatron_dmtd.platform import Platform
from megatron_dmtd.platform.machine import read_bytes_per_s
from megatron_dmtd.quickstart.large import measure, random_model
from megatron_dmtd.quickstart.plan import CONTROL, DMTD, Machine, Plan

CPU = Platform(device=torch.device("cpu"), backend="gloo")
PLAN = Plan(root=Path(), directory=Path(), machine=Machine(num_gpus=0, num_cores=1), timed_runs=1, large_layers=(2, 1))


def test_the_large_model_is_the_size_of_a_gigabyte_in_the_proportion_of_a_published_one():
    fields = Plan(root=Path(), directory=Path(), machine=Machine(num_gpus=0, num_cores=1)).large_fields()
    assert (fields["num_parallel_layers"], fields["num_sequential_layers"]) == (14, 4)  # 28 and 8 in Qwen3-4B


def test_both_ways_of_decoding_are_timed_with_the_bytes_that_each_reads():
    found = measure(PLAN, CPU, new_tokens=4)
    # per layer: queries and output 2 * 1024 * 2048, keys and values 2 * 1024 * 1024, MLP 3 * 1024 * 3072; the head 32,000 * 1024
    layer, head = 2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072, 32_000 * 1024
    assert found["models"][CONTROL]["bytes_per_token"] == 4 * (3 * layer + head)
    assert found["models"][DMTD]["bytes_per_token"] == 4 * (2 * layer / 4 + layer + head)
    assert found["parameters"] == 3 * layer + head + 3 * (2 * 1024 + 2 * 128) + 1024
    for name in (DMTD, CONTROL):
        model = found["models"][name]
        assert len(model["tokens_per_s_runs"]) == 1 and model["tokens_per_s"] == model["tokens_per_s_runs"][0] > 0
    assert found["read_bytes_per_s"] > 1e8


def test_weights_are_random_and_the_same_each_time():
    first, second = (random_model(PLAN, CPU).embedding_VX for _ in range(2))
    assert torch.equal(first, second) and 0.015 < first.std() < 0.02
    assert read_bytes_per_s(CPU.device) > 0


@pytest.mark.parametrize("layers", [(1, 1), (3, 2)])
def test_layers_are_those_of_the_plan(layers):
    plan = Plan(root=Path(), directory=Path(), machine=Machine(num_gpus=0, num_cores=1), large_layers=layers)
    assert (plan.large_fields()["num_parallel_layers"], plan.large_fields()["num_sequential_layers"]) == layers
