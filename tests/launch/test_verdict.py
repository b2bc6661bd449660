"""From reports to the bad node: each fault is planted on one node and must be named there, with a remedy."""

from dataclasses import replace

import pytest

from megatron_dmtd.launch.health import Gpu, Report, parse_gpus
from megatron_dmtd.launch.links import Link, pair_rounds
from megatron_dmtd.launch.verdict import Limits, judge, judge_all_reduce, judge_links

HOSTS = ["node1", "node2", "node3"]
LIMITS = Limits(min_free_gib=10, min_bandwidth_gb_s=20, max_clock_skew_s=2)
GPU = Gpu(index=0, name="H100", driver="570", temperature_c=40, used_gib=0.1, uncorrected_errors=0, is_slowed=False)


def healthy() -> list[Report]:
    """Two ranks on each of three nodes with two GPUs."""
    return [
        Report(
            rank=rank,
            host=HOSTS[rank // 2],
            device="cuda",
            versions={"torch": "2.13.0"},
            matmul_gflops=600_000.0,
            matmul_is_right=True,
            free_gib=100.0 if rank % 2 == 0 else None,
            gpus=(GPU, replace(GPU, index=1)) if rank % 2 == 0 else (),
            clock_s=1000.0 + rank / 1000,
        )
        for rank in range(6)
    ]


def judged(reports: list[Report]):
    return judge(reports, hosts=HOSTS, ranks_per_node=2, limits=LIMITS)


def test_healthy_nodes_are_not_named():
    assert judged(healthy()) == []


FAULTS = {
    "version": ({"versions": {"torch": "2.12.0"}}, "torch version '2.12.0' on node2, '2.13.0' elsewhere"),
    "no-gpu": ({"device": "cpu"}, "kind of device 'cpu' on node2"),
    "driver": ({"gpus": (replace(GPU, driver="535"),) * 2}, "driver '535' on node2"),
    "model": ({"gpus": (replace(GPU, name="A100"),) * 2}, "GPU model 'A100' on node2"),
    "disk": ({"free_gib": 3.0}, "3.0 GiB free"),
    "full-disk": ({"free_gib": 0.0}, "0.0 GiB free"),
    "folder": ({"shares_folder": False}, "not that of rank 0"),
    "clock": ({"clock_s": 1007.0}, "clocks off by +7.0 s on node2"),
    "ecc": ({"gpus": (GPU, replace(GPU, index=1, uncorrected_errors=4))}, "GPU 1 has 4 uncorrected memory errors"),
    "heat": ({"gpus": (replace(GPU, is_slowed=True, temperature_c=93), GPU)}, "GPU 0 is throttled by the hardware at 93 C"),
    "occupied": ({"gpus": (replace(GPU, used_gib=30.5), GPU)}, "GPU 0 has 30.5 GiB in use by another process"),
    "few-gpus": ({"gpus": (GPU,)}, "1 GPUs for 2 ranks"),
    "slow": ({"matmul_gflops": 300_000.0}, "rank 2 multiplies at 300 TFLOP/s"),
    "wrong": ({"matmul_is_right": False}, "rank 2 computes wrong products"),
    "error": ({"errors": ("nvidia-smi: no devices",)}, "rank 2: nvidia-smi: no devices"),
}


@pytest.mark.parametrize(("changes", "found"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found_on_its_node_alone(changes, found):
    reports = healthy()
    reports[2] = replace(reports[2], **changes)
    (problem,) = judged(reports)
    assert problem.nodes == ("node2",) and found in problem.found
    assert problem.required and problem.remedy and "BAD NODE node2" in str(problem)


def test_a_node_whose_ranks_do_not_report_is_named():
    (problem,) = judged([report for report in healthy() if report.host != "node3"])
    assert problem.nodes == ("node3",) and problem.found == "no report from ranks 4, 5"


def test_ranks_missing_on_every_node_blame_no_node():
    (problem,) = judged([report for report in healthy() if report.rank % 2 == 0])
    assert problem.nodes == () and "ranks 1, 3, 5" in problem.found and str(problem).startswith("NOT READY")


def test_many_missing_ranks_are_shortened():
    problems = judge(healthy()[:2], hosts=[f"node{index}" for index in range(1, 7)], ranks_per_node=2, limits=LIMITS)
    assert problems[0].found == "no report from ranks 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"


def test_a_folder_that_is_full_everywhere_blames_no_node():
    (problem,) = judged([replace(report, free_gib=1.0 if report.free_gib else None) for report in healthy()])
    assert problem.nodes == () and "MIN_FREE_GIB" in problem.remedy


def test_a_tie_between_versions_blames_no_node():
    reports = healthy()[:4]
    reports[2:] = [replace(report, versions={"torch": "2.12.0"}) for report in reports[2:]]
    (problem,) = judge(reports, hosts=HOSTS[:2], ranks_per_node=2, limits=LIMITS)
    assert problem.nodes == () and "torch version" in problem.found


def test_ranks_out_of_the_order_of_nodes_are_refused():
    reports = healthy()
    reports[1], reports[2] = replace(reports[1], host="node2"), replace(reports[2], host="node1")
    problem = judged(reports)[0]
    assert problem.found == "rank 1 on node2, 2 such ranks" and "distribution=block" in problem.remedy


def link(first: str, second: str, gb_s: float = 40.0, error: str = "") -> Link:
    return Link(first=first, second=second, gb_s=gb_s, error=error)


@pytest.mark.parametrize(
    ("links", "nodes"),
    [
        ([link("a", "b"), link("b", "c"), link("c", "d"), link("d", "a")], None),
        ([link("a", "b", 5), link("b", "c", 5), link("c", "d"), link("d", "a")], ("b",)),
        ([link("a", "b", 0, "timed out"), link("b", "c", 0, "timed out"), link("c", "a")], ("b",)),
        ([link("a", "b", 5), link("b", "c"), link("c", "d"), link("d", "a")], ()),
        ([link("a", "b", 5)], ()),
        ([link("a", "b", 0, "x"), link("b", "c", 0, "x")], ("b",)),
    ],
    ids=["all-good", "slow-node", "dead-node", "one-cable", "two-nodes", "none-good"],
)
def test_the_node_between_two_bad_links_is_named(links, nodes):
    problems = judge_links(links, limits=LIMITS, on_gpus=True)
    assert ([problem.nodes for problem in problems] or [None]) == [nodes]


def test_speed_is_not_judged_on_cpus_but_failures_are():
    assert judge_links([link("a", "b", 0.1)], limits=LIMITS, on_gpus=False) == []
    assert judge_links([link("a", "b", 0.0, "refused")], limits=LIMITS, on_gpus=False)
    assert judge_all_reduce(0.1, is_right=True, limits=LIMITS, on_gpus=False) == []


def test_an_all_reduce_that_is_slow_or_wrong_is_refused():
    assert judge_all_reduce(25, is_right=True, limits=LIMITS, on_gpus=True) == []
    assert "5.00 GB/s, correct sums" in judge_all_reduce(5, is_right=True, limits=LIMITS, on_gpus=True)[0].found
    (problem,) = judge_all_reduce(25, is_right=False, errors=["rank 3: reset"], limits=LIMITS, on_gpus=True)
    assert "wrong sums; rank 3: reset" in problem.found


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5, 16])
def test_rounds_pair_each_node_with_both_neighbours_and_with_one_at_a_time(num_nodes):
    rounds = pair_rounds(num_nodes)
    for pairs in rounds:
        nodes = [node for pair in pairs for node in pair]
        assert len(nodes) == len(set(nodes))
    edges = {frozenset(pair) for pairs in rounds for pair in pairs}
    assert edges == {frozenset((node, (node + 1) % num_nodes)) for node in range(num_nodes) if num_nodes > 1}


def test_nvidia_smi_is_read_with_and_without_ecc():
    text = "0, NVIDIA H100 80GB HBM3, 570.124.06, 34, 1024, 2, Not Active\n1, RTX, 570.124.06, 88, 512, [N/A], Active\n"
    first, second = parse_gpus(text)
    assert (first.name, first.used_gib, first.uncorrected_errors, first.is_slowed) == ("NVIDIA H100 80GB HBM3", 1.0, 2, False)
    assert (second.index, second.temperature_c, second.uncorrected_errors, second.is_slowed) == (1, 88.0, 0, True)
