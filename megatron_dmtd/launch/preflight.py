"""Preflight of a job: every rank reports, rank 0 judges, names the bad nodes and writes down what it saw.

Ranks talk through a store of rank 0's until all are known to be there; only then through collectives. A rank that never comes,
hangs or dies is one without a report when the time is up.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_dmtd.errors import CapabilityError, ConfigError
from megatron_dmtd.infra.files import write_atomically
from megatron_dmtd.launch import health, links
from megatron_dmtd.launch.health import Gpu, Report
from megatron_dmtd.launch.links import Link
from megatron_dmtd.launch.verdict import Limits, Problem, judge, judge_all_reduce, judge_links
from megatron_dmtd.platform.device import Platform, current_platform

FAILED = 8
#: a file on a network file system may be seen late on another node
_FILE_S = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The ranks, and where they meet."""

    rank: int
    local_rank: int
    hosts: list[str]
    """The nodes in the order of ranks."""
    ranks_per_node: int
    folder: str
    """The shared work folder."""
    timeout_s: float
    """Time that each of the few phases may take."""

    @property
    def num_ranks(self) -> int:
        """All ranks of the job."""
        return len(self.hosts) * self.ranks_per_node


@dataclass(kw_only=True, slots=True)
class Result:
    """What rank 0 saw."""

    reports: list[Report] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    all_reduce_gb_s: float = 0.0
    problems: list[Problem] = field(default_factory=list)

    def bad_nodes(self) -> list[str]:
        """The nodes to avoid, in order."""
        return sorted({node for problem in self.problems for node in problem.nodes})


class Meeting:
    """What ranks tell rank 0, and it tells them, through a store that rank 0 holds."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.store = _store_of_rank_0(job)
        self._absent: set[int] = set()

    def tell(self, what: str, values: dict[str, Any]) -> None:
        """Tell rank 0."""
        self.store.set(f"{what}/{self.job.rank}", json.dumps(values))

    def hear(self, what: str, *, own: bool = True) -> dict[int, dict[str, Any]]:
        """What each rank told; ranks that told nothing in the time of a phase are left out, and not waited for again."""
        deadline = time.monotonic() + self.job.timeout_s
        waiting = set(range(0 if own else 1, self.job.num_ranks)) - self._absent
        heard: dict[int, dict[str, Any]] = {}
        while waiting and time.monotonic() < deadline:
            for rank in sorted(waiting):
                if self.store.check([f"{what}/{rank}"]):
                    heard[rank] = json.loads(self.store.get(f"{what}/{rank}"))
            waiting -= heard.keys()
            time.sleep(0.02)
        self._absent |= waiting
        return dict(sorted(heard.items()))

    def decide(self, what: str, is_good: bool | None = None) -> bool:
        """Rank 0's decision, which it gives and the others wait for."""
        if is_good is not None:
            self.store.set(what, "good" if is_good else "bad")
        return bool(self.store.get(what) == b"good")

    def leave(self) -> None:
        """Rank 0 holds the store, so it goes last."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self.tell("bye", {})
        if self.job.rank == 0:
            self.hear("bye")


def _store_of_rank_0(job: Job) -> dist.TCPStore:
    """The store, once rank 0 answers. Raises `ConfigError` if its host is unknown here, `CapabilityError` if it is silent."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.getaddrinfo(address, port)
    except OSError as error:
        raise ConfigError(
            found=f"rank {job.rank} on {_host()} does not know the name {address}: {error.strerror}",
            required="a name or address of rank 0's node that every node knows",
            remedy="give an address (RENDEZVOUS=address in the site file), or have the nodes' names put into DNS",
        ) from error
    try:
        store = dist.TCPStore(
            address,
            port,
            world_size=None,
            is_master=job.rank == 0,
            timeout=datetime.timedelta(seconds=job.timeout_s),
            wait_for_workers=False,
        )
        # rank 0 may wait for another rank's report, once in each phase
        store.set_timeout(datetime.timedelta(seconds=3 * job.timeout_s))
        return store
    except RuntimeError as error:
        what = "cannot listen at" if job.rank == 0 else f"had no answer in {job.timeout_s:g} s from"
        raise CapabilityError(
            found=f"rank {job.rank} on {_host()} {what} {address}:{port}: {str(error).splitlines()[0]}",
            required="a port of rank 0's node that is free and open to the other nodes",
            remedy="look whether rank 0 started, at NETWORK_INTERFACE, and at firewalls between the nodes",
        ) from error


def _host() -> str:
    """Name of this node: Slurm's where there is one, since bad nodes are excluded by it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def run_preflight(job: Job, limits: Limits) -> tuple[Result | None, bool]:
    """The whole preflight, on every rank. Rank 0 gets the result; all get whether the job may start."""
    # A collective that is late has to raise in this process, not to end it: rank 0 must live to name the node.
    os.environ |= {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    own_report = _report_of_this_rank(job)
    meeting = Meeting(job)
    meeting.tell("report", asdict(_with_shared_checks(own_report, meeting)))
    result = Result() if job.rank == 0 else None
    if result is not None:
        result.reports = [_to_report(values) for values in meeting.hear("report").values()]
        result.problems = judge(result.reports, hosts=job.hosts, ranks_per_node=job.ranks_per_node, limits=limits)
    is_good = meeting.decide("reports", _is_good(result)) and _try_links(meeting, limits, result)
    meeting.leave()
    return result, is_good


def _is_good(result: Result | None) -> bool | None:
    """None on ranks that do not decide."""
    return None if result is None else not result.problems


def _report_of_this_rank(job: Job) -> Report:
    gpus, errors = health.read_gpus() if job.local_rank == 0 else ((), ())
    platform = current_platform()
    gflops, is_right = health.multiply(platform)
    return Report(
        rank=job.rank,
        host=_host(),
        device=platform.device.type,
        versions=health.versions(),
        matmul_gflops=gflops,
        matmul_is_right=is_right,
        free_gib=health.free_gib(job.folder) if job.local_rank == 0 else None,
        gpus=gpus,
        errors=errors,
    )


def _with_shared_checks(report: Report, meeting: Meeting) -> Report:
    """The report with what needs rank 0: one file that all should see, and one moment at which all read their clocks."""
    job, store = meeting.job, meeting.store
    if job.rank == 0:
        path = Path(job.folder, f".preflight-{os.environ.get('SLURM_JOB_ID', os.getpid())}")
        content = os.urandom(8).hex()
        write_atomically(path, content)
        store.set("file", f"{path}\n{content}")
        meeting.hear("present", own=False)
        store.set("now", "")
        clock_s = time.time()
        meeting.hear("looked", own=False)
        path.unlink()
        return replace(report, clock_s=clock_s)
    name, content = store.get("file").decode().split("\n")
    meeting.tell("present", {})
    store.get("now")
    clock_s = time.time()
    shares = job.local_rank != 0 or _sees(Path(name), content)
    meeting.tell("looked", {})
    return replace(report, clock_s=clock_s, shares_folder=shares)


def _sees(path: Path, content: str) -> bool:
    deadline = time.monotonic() + _FILE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            return path.read_text() == content
        time.sleep(0.2)
    return False


def _to_report(values: dict[str, Any]) -> Report:
    gpus = tuple(Gpu(**gpu) for gpu in values.pop("gpus"))
    return Report(**{**values, "gpus": gpus, "errors": tuple(values["errors"])})


def _try_links(meeting: Meeting, limits: Limits, result: Result | None) -> bool:
    """Neighbours, then all together; adds to rank 0's result. Whether all is well."""
    platform, job = current_platform(), meeting.job
    dist.init_process_group(
        platform.backend,
        store=dist.PrefixStore("group", meeting.store),
        rank=job.rank,
        world_size=job.num_ranks,
        timeout=datetime.timedelta(seconds=job.timeout_s / 2),
    )
    mine = links.measure_pairs(platform, hosts=job.hosts, ranks_per_node=job.ranks_per_node)
    meeting.tell("links", {"links": [asdict(link) for link in mine]})
    if result is not None:
        result.links = [Link(**link) for values in meeting.hear("links").values() for link in values["links"]]
        result.problems += judge_links(result.links, limits=limits, on_gpus=platform.is_cuda)
    return meeting.decide("links", _is_good(result)) and _try_all_reduce(meeting, platform, limits, result)


def _try_all_reduce(meeting: Meeting, platform: Platform, limits: Limits, result: Result | None) -> bool:
    gb_s, is_right, error = 0.0, False, ""
    try:
        gb_s, is_right = links.measure_all_reduce(platform)
    except RuntimeError as failure:
        error = str(failure).splitlines()[0]
    meeting.tell("sums", {"is_right": is_right, "error": error})
    if result is not None:
        sums = meeting.hear("sums")
        all_right = len(sums) == meeting.job.num_ranks and all(values["is_right"] for values in sums.values())
        errors = tuple(f"rank {rank}: {values['error']}" for rank, values in sums.items() if values["error"])
        result.all_reduce_gb_s = gb_s
        result.problems += judge_all_reduce(gb_s, is_right=all_right, errors=errors, limits=limits, on_gpus=platform.is_cuda)
    return meeting.decide("sums", _is_good(result))


def describe(result: Result, job: Job) -> str:
    """What was seen, for people."""
    lines = []
    for report in result.reports:
        if report.rank % job.ranks_per_node == 0:
            lines.append(
                f"{report.host}: ranks from {report.rank}, {report.device}, {len(report.gpus)} GPUs, "
                f"{report.free_gib or 0:.0f} GiB free, {report.matmul_gflops:.0f} GFLOP/s, torch {report.versions['torch']}"
            )
    lines += [f"{link.first} - {link.second}: {link.error or f'{link.gb_s:.2f} GB/s'}" for link in result.links]
    if result.all_reduce_gb_s:
        lines.append(f"all-reduce over {job.num_ranks} ranks: {result.all_reduce_gb_s:.2f} GB/s")
    lines += [str(problem) for problem in result.problems]
    return "\n".join([*lines, "preflight: " + ("NOT PASSED" if result.problems else "passed")])


def write_result(path: Path, result: Result) -> None:
    """The result as JSON, and beside it the bad nodes as Slurm takes them (`PATH.bad_nodes`, empty if there are none)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(result), indent=2) + "\n")
    write_atomically(
        path.with_name(path.name + ".bad_nodes"), ",".join(result.bad_nodes()) + ("\n" if result.bad_nodes() else "")
    )
