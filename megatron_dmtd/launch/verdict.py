"""Diagnose from all ranks' reports which node is bad and what to do. Pure functions; no torch."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_dmtd.launch.health import Report
    from megatron_dmtd.launch.links import Link

#: a GPU slower than this share of the median is faulty; smaller differences are noise
_SLOW_SHARE = 0.75
_OCCUPIED_GIB = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The site's requirements."""

    min_free_gib: float
    min_bandwidth_gb_s: float
    max_clock_skew_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A problem that must be fixed before the run may start."""

    nodes: tuple[str, ...]
    """The affected nodes, to be avoided; empty if avoiding nodes would not help."""
    found: str
    required: str
    remedy: str

    def __str__(self) -> str:
        where = f"BAD NODE {', '.join(self.nodes)}\n" if self.nodes else "NOT READY\n"
        return f"{where}  found: {self.found}\n  required: {self.required}\n  remedy: {self.remedy}"


def judge(reports: Sequence[Report], *, hosts: Sequence[str], ranks_per_node: int, limits: Limits) -> list[Problem]:
    """Problems that the reports alone show. A rank without a report is missing."""
    return [
        *_missing(reports, hosts, ranks_per_node),
        *_misplaced(reports, hosts, ranks_per_node),
        *_errors(reports),
        *_versions(reports),
        *_devices(reports),
        *_disks(reports, limits),
        *_folders(reports),
        *_clocks(reports, limits),
        *_gpus(reports, ranks_per_node),
        *_arithmetic(reports),
    ]


def _missing(reports: Sequence[Report], hosts: Sequence[str], ranks_per_node: int) -> list[Problem]:
    there = {report.rank for report in reports}
    absent = [rank for rank in range(len(hosts) * ranks_per_node) if rank not in there]
    nodes = tuple(dict.fromkeys(hosts[rank // ranks_per_node] for rank in absent))
    if not absent:
        return []
    if len(nodes) == len(hosts):
        nodes = ()
    return [
        Problem(
            nodes=nodes,
            found=f"no report from ranks {_few(absent)}",
            required="a report from every rank within the time limit",
            remedy="check the node's slurmd log, mounts and network, or start without it (sbatch --exclude)",
        )
    ]


def _few(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _misplaced(reports: Sequence[Report], hosts: Sequence[str], ranks_per_node: int) -> list[Problem]:
    wrong = [report for report in reports if report.host.split(".")[0] != hosts[report.rank // ranks_per_node].split(".")[0]]
    return [
        Problem(
            nodes=(),
            found=f"rank {report.rank} on {report.host}, {len(wrong)} such ranks",
            required=f"ranks in the order of the nodes: that rank on {hosts[report.rank // ranks_per_node]}",
            remedy="start ranks with srun --distribution=block:block and the same number on each node",
        )
        for report in wrong[:1]
    ]


def _errors(reports: Sequence[Report]) -> list[Problem]:
    return [
        Problem(
            nodes=(report.host,),
            found=f"rank {report.rank}: {'; '.join(report.errors)}",
            required="a node that can run the checks",
            remedy="have the node checked (dmesg, nvidia-smi -q), or start without it (sbatch --exclude)",
        )
        for report in reports
        if report.errors
    ]


def _outvoted(reports: Sequence[Report], value: Callable[[Report], str], what: str, remedy: str) -> list[Problem]:
    """Nodes whose `value` differs from that of most ranks. A tie names no node."""
    counts = Counter(map(value, reports)).most_common()
    if len(counts) < 2:
        return []
    common = counts[0][0]
    nodes = tuple(dict.fromkeys(report.host for report in reports if value(report) != common))
    others = ", ".join(repr(text) for text, _ in counts[1:4])
    is_tie = counts[0][1] == counts[1][1]
    return [
        Problem(
            nodes=() if is_tie else nodes,
            found=f"{what} {others} on {', '.join(nodes)}, {common!r} elsewhere",
            required=f"the same {what} everywhere",
            remedy=remedy,
        )
    ]


def _versions(reports: Sequence[Report]) -> list[Problem]:
    names = sorted({name for report in reports for name in report.versions})
    remedy = "use one environment shared by all nodes (VENV or CONTAINER_IMAGE), or start without the named nodes"
    return [
        problem
        for name in names
        for problem in _outvoted(reports, lambda report, name=name: report.versions.get(name, "none"), f"{name} version", remedy)  # type: ignore[misc]
    ]


def _devices(reports: Sequence[Report]) -> list[Problem]:
    remedy = "ranks without a GPU would train on the CPU: have the node's driver checked, or start without the node"
    kinds = _outvoted(reports, lambda report: report.device, "kind of device", remedy)
    with_gpus = [report for report in reports if report.gpus]
    drivers = _outvoted(with_gpus, lambda report: report.gpus[0].driver, "driver", "have the same driver installed everywhere")
    models = _outvoted(with_gpus, lambda report: report.gpus[0].name, "GPU model", "request one model with --constraint")
    return [*kinds, *drivers, *models]


def _disks(reports: Sequence[Report], limits: Limits) -> list[Problem]:
    asked = {report.host: report.free_gib for report in reports if report.free_gib is not None}
    scarce = {host: free_gib for host, free_gib in asked.items() if free_gib < limits.min_free_gib}
    if not scarce:
        return []
    # the folder is shared: if all nodes see it full, other nodes would not help
    nodes = () if len(scarce) == len(asked) else tuple(scarce)
    return [
        Problem(
            nodes=nodes,
            found=f"{min(scarce.values()):.1f} GiB free in the work folder",
            required=f"{limits.min_free_gib:g} GiB (MIN_FREE_GIB)",
            remedy="free some space, lower checkpoint.keep_last, or correct MIN_FREE_GIB",
        )
    ]


def _folders(reports: Sequence[Report]) -> list[Problem]:
    nodes = tuple(dict.fromkeys(report.host for report in reports if not report.shares_folder))
    return [
        Problem(
            nodes=nodes,
            found="the work folder here is not that of rank 0: a file written there is missing or has other contents",
            required="one WORK_DIR, shared by all nodes",
            remedy="have the mount checked (mount, df), start without the node, or correct WORK_DIR",
        )
        for _ in [0]
        if nodes
    ]


def _clocks(reports: Sequence[Report], limits: Limits) -> list[Problem]:
    usual = statistics.median(report.clock_s for report in reports) if reports else 0.0
    late = {report.host: report.clock_s - usual for report in reports if abs(report.clock_s - usual) > limits.max_clock_skew_s}
    return [
        Problem(
            nodes=tuple(late),
            found="clocks off by " + ", ".join(f"{skew:+.1f} s on {host}" for host, skew in late.items()),
            required=f"within {limits.max_clock_skew_s:g} s of each other (MAX_CLOCK_SKEW_S)",
            remedy="have chrony or ntpd checked; credentials and logs depend on the clock",
        )
        for _ in [0]
        if late
    ]


def _gpus(reports: Sequence[Report], ranks_per_node: int) -> list[Problem]:
    problems = []
    for report in reports:
        faults = [
            f"GPU {gpu.index} {fault}"
            for gpu in report.gpus
            for fault, is_there in (
                (f"has {gpu.uncorrected_errors} uncorrected memory errors", gpu.uncorrected_errors > 0),
                (f"is throttled by the hardware at {gpu.temperature_c:g} C", gpu.is_slowed),
                (f"has {gpu.used_gib:.1f} GiB in use by another process", gpu.used_gib > _OCCUPIED_GIB),
            )
            if is_there
        ]
        if report.gpus and len(report.gpus) < ranks_per_node:
            faults.append(f"{len(report.gpus)} GPUs for {ranks_per_node} ranks")
        if faults:
            problems.append(
                Problem(
                    nodes=(report.host,),
                    found="; ".join(faults),
                    required="as many healthy, free GPUs as ranks",
                    remedy="have the node drained and checked (nvidia-smi -q, dmesg for Xid); start without it",
                )
            )
    return problems


def _arithmetic(reports: Sequence[Report]) -> list[Problem]:
    problems = []
    on_gpus = [report.matmul_gflops for report in reports if report.device != "cpu"]
    usual = statistics.median(on_gpus) if on_gpus else 0.0
    for report in reports:
        is_slow = report.device != "cpu" and report.matmul_gflops < _SLOW_SHARE * usual
        if report.matmul_is_right and not is_slow:
            continue
        wrong = (
            "computes wrong products" if not report.matmul_is_right else f"multiplies at {report.matmul_gflops / 1e3:.0f} TFLOP/s"
        )
        problems.append(
            Problem(
                nodes=(report.host,),
                found=f"rank {report.rank} {wrong}",
                required=f"correct products at {_SLOW_SHARE:.0%} or more of the median speed ({usual / 1e3:.0f} TFLOP/s)",
                remedy="have the GPU tested (dcgmi diag -r 3) and the node drained; start without it",
            )
        )
    return problems


def judge_links(links: Sequence[Link], *, limits: Limits, on_gpus: bool) -> list[Problem]:
    """Find a badly connected node: one whose links are all bad while others' are good. On CPUs, speed is not judged."""
    least = limits.min_bandwidth_gb_s if on_gpus else 0.0
    bad = [link for link in links if link.error or link.gb_s < least]
    if not bad:
        return []
    good_ends = {end for link in links if link not in bad for end in (link.first, link.second)}
    ends = [end for link in bad for end in (link.first, link.second)]
    named = tuple(dict.fromkeys(end for end in ends if end not in good_ends))
    if not good_ends:
        most = max(Counter(ends).values())
        named = tuple(dict.fromkeys(end for end in ends if Counter(ends)[end] == most))
        named = named if len(named) == 1 else ()
    found = "; ".join(f"{link.first} - {link.second}: {link.error or f'{link.gb_s:.2f} GB/s'}" for link in bad[:4])
    return [
        Problem(
            nodes=named,
            found=f"{len(bad)} of {len(links)} links between neighbours are bad: {found}",
            required=f"successful transfers at {least:g} GB/s or more (MIN_BANDWIDTH_GB_S)",
            remedy="check NETWORK_INTERFACE and the fabric (ibstat, NCCL_DEBUG=INFO), or start without the node",
        )
    ]


def judge_all_reduce(gb_s: float, *, is_right: bool, errors: Sequence[str] = (), limits: Limits, on_gpus: bool) -> list[Problem]:
    """Judge the all-reduce over all ranks, which cannot point to a node."""
    least = limits.min_bandwidth_gb_s if on_gpus else 0.0
    if is_right and gb_s >= least:
        return []
    return [
        Problem(
            nodes=(),
            found="; ".join(
                [f"all-reduce of all ranks: {gb_s:.2f} GB/s, {'correct' if is_right else 'wrong'} sums", *errors[:3]]
            ),
            required=f"correct sums at {least:g} GB/s or more (MIN_BANDWIDTH_GB_S)",
            remedy="set NCCL_DEBUG=INFO to see which transport NCCL chose; check NETWORK_INTERFACE",
        )
    ]
