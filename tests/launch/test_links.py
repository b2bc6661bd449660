from itertools import chain

import pytest
import torch
import torch.distributed as dist

from megatron_dmtd.launch.links import Link, measure_all_reduce, measure_pairs, pair_rounds
from megatron_dmtd.platform.device import Platform
from tests.support.ranks import run_ranks

CPU = Platform(device=torch.device("cpu"), backend="gloo")


def test_one_node_has_no_neighbour_and_two_have_one_link():
    assert pair_rounds(1) == [] and pair_rounds(2) == [[(0, 1)]]
    assert pair_rounds(4) == [[(0, 1), (2, 3)], [(1, 2), (3, 0)]]


@pytest.mark.parametrize("num_nodes", [3, 4, 5, 8, 17])
def test_rounds_are_disjoint_and_put_each_node_with_both_neighbours(num_nodes):
    rounds = pair_rounds(num_nodes)
    for pairs in rounds:
        nodes = list(chain.from_iterable(pairs))
        assert len(set(nodes)) == len(nodes)
    ring = sorted(tuple(sorted((node, (node + 1) % num_nodes))) for node in range(num_nodes))
    assert sorted(tuple(sorted(pair)) for pair in chain.from_iterable(rounds)) == ring
    assert len(rounds) == 2 + num_nodes % 2


def _measure(hosts: list[str], ranks_per_node: int) -> tuple[list[Link], tuple[float, bool]]:
    return measure_pairs(CPU, hosts=hosts, ranks_per_node=ranks_per_node), measure_all_reduce(CPU)


@pytest.mark.multiprocess
def test_the_first_ranks_of_neighbouring_nodes_are_timed_and_all_ranks_add_up():
    found = run_ranks(4, _measure, ["a", "b"], 2)
    (link,) = found[0][0]
    assert (link.first, link.second, link.error) == ("a", "b", "") and link.gb_s > 0
    assert [links for links, _ in found[1:]] == [[], [], []]
    assert all(gb_s > 0 and is_right for _, (gb_s, is_right) in found)


def _measure_failing() -> list[Link]:
    def send(*_: object) -> None:
        raise RuntimeError("connection reset by the fabric\nwith a long trace")

    dist.send = dist.recv = send  # type: ignore[assignment]
    return measure_pairs(CPU, hosts=["a", "b"], ranks_per_node=1)


@pytest.mark.multiprocess
def test_a_link_that_fails_is_reported_by_its_ends_and_first_words():
    found = run_ranks(2, _measure_failing)
    assert found == [[Link(first="a", second="b", gb_s=0.0, error="connection reset by the fabric")], []]
