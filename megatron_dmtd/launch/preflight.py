"""Preflight checks of a job: every rank reports, rank 0 judges the reports, names bad nodes and records the results.

Ranks communicate through a store on rank 0 until all are known to be present, and only then through collectives. A rank that
never starts, hangs or dies has no report when the time is up.
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
#: a file on a network file system may become visible on other nodes with a delay
_FILE_S = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """A rank, and the layout of its job."""

    rank: int
    local_rank: int
    hosts: list[str]
    """The nodes in rank order."""
    ranks_per_node: int
    folder: str
    """The shared work folder."""
    timeout_s: float
    """Time limit of each phase."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the job."""
        return len(self.hosts) * self.ranks_per_node


@dataclass(kw_only=True, slots=True)
class Result:
    """What rank 0 has found."""

    reports: list[Report] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    all_reduce_gb_s: float = 0.0
    problems: list[Problem] = field(default_factory=list)

    def bad_nodes(self) -> list[str]:
        """The nodes to avoid, sorted."""
        return sorted({node for problem in self.problems for node in problem.nodes})


class Rendezvous:
    """Messages between rank 0 and the others, through a store on rank 0."""

    def __init__(self, info: RankInfo) -> None:
        self.info = info
        self.store = _store_of_rank_0(info)
        self._absent: set[int] = set()

    def send(self, what: str, values: dict[str, Any]) -> None:
        """Send values to rank 0."""
        self.store.set(f"{what}/{self.info.rank}", json.dumps(values))

    def gather(self, what: str, *, own: bool = True) -> dict[int, dict[str, Any]]:
        """What each rank sent. Ranks that send nothing within the phase's time are left out, and not waited for again."""
        deadline = time.monotonic() + self.info.timeout_s
        waiting = set(range(0 if own else 1, self.info.num_ranks)) - self._absent
        received: dict[int, dict[str, Any]] = {}
        while waiting and time.monotonic() < deadline:
            for rank in sorted(waiting):
                if self.store.check([f"{what}/{rank}"]):
                    received[rank] = json.loads(self.store.get(f"{what}/{rank}"))
            waiting -= received.keys()
            time.sleep(0.02)
        self._absent |= waiting
        return dict(sorted(received.items()))

    def decide(self, what: str, is_good: bool | None = None) -> bool:
        """Broadcast rank 0's decision: rank 0 passes it, the others wait for it."""
        if is_good is not None:
            self.store.set(what, "good" if is_good else "bad")
        return bool(self.store.get(what) == b"good")

    def leave(self) -> None:
        """Leave together; rank 0, which holds the store, leaves last."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self.send("bye", {})
        if self.info.rank == 0:
            self.gather("bye")


def _store_of_rank_0(info: RankInfo) -> dist.TCPStore:
    """Connect to rank 0's store. Raises `ConfigError` if its host is unknown here, `CapabilityError` if it does not answer."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.getaddrinfo(address, port)
    except OSError as error:
        raise ConfigError(
            found=f"rank {info.rank} on {_host()} does not know the name {address}: {error.strerror}",
            required="a name or address of rank 0's node that every node knows",
            remedy="set RENDEZVOUS=address in the site file, or add the nodes' names to DNS",
        ) from error
    try:
        store = dist.TCPStore(
            address,
            port,
            world_size=None,
            is_master=info.rank == 0,
            timeout=datetime.timedelta(seconds=info.timeout_s),
            wait_for_workers=False,
        )
        # rank 0 may be waiting for another rank's report, for a whole phase each time
        store.set_timeout(datetime.timedelta(seconds=3 * info.timeout_s))
        return store
    except RuntimeError as error:
        what = "cannot listen at" if info.rank == 0 else f"had no answer in {info.timeout_s:g} s from"
        raise CapabilityError(
            found=f"rank {info.rank} on {_host()} {what} {address}:{port}: {str(error).splitlines()[0]}",
            required="a port of rank 0's node that is free and open to the other nodes",
            remedy="check that rank 0 started, NETWORK_INTERFACE, and firewalls between the nodes",
        ) from error


def _host() -> str:
    """Name of this node, as Slurm knows it if it runs under Slurm: bad nodes are excluded by that name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def run_preflight(info: RankInfo, limits: Limits) -> tuple[Result | None, bool]:
    """Run the preflight checks on every rank. Returns the result (rank 0 only) and whether the job may start (all ranks)."""
    # A collective that times out must raise an error, not end the process: rank 0 has to survive to name the node.
    os.environ |= {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    own_report = _report_of_this_rank(info)
    rendezvous = Rendezvous(info)
    rendezvous.send("report", asdict(_with_shared_checks(own_report, rendezvous)))
    result = Result() if info.rank == 0 else None
    if result is not None:
        result.reports = [_to_report(values) for values in rendezvous.gather("report").values()]
        result.problems = judge(result.reports, hosts=info.hosts, ranks_per_node=info.ranks_per_node, limits=limits)
    is_good = rendezvous.decide("reports", _is_good(result)) and _try_links(rendezvous, limits, result)
    rendezvous.leave()
    return result, is_good


def _is_good(result: Result | None) -> bool | None:
    """Whether no problem was found; None on ranks other than 0."""
    return None if result is None else not result.problems


def _report_of_this_rank(info: RankInfo) -> Report:
    gpus, errors = health.read_gpus() if info.local_rank == 0 else ((), ())
    platform = current_platform()
    gflops, is_right = health.multiply(platform)
    return Report(
        rank=info.rank,
        host=_host(),
        device=platform.device.type,
        versions=health.versions(),
        matmul_gflops=gflops,
        matmul_is_right=is_right,
        free_gib=health.free_gib(info.folder) if info.local_rank == 0 else None,
        gpus=gpus,
        errors=errors,
    )


def _with_shared_checks(report: Report, rendezvous: Rendezvous) -> Report:
    """The report completed by the checks that need rank 0: a file that all should see, and clocks read at the same moment."""
    info, store = rendezvous.info, rendezvous.store
    if info.rank == 0:
        path = Path(info.folder, f".preflight-{os.environ.get('SLURM_JOB_ID', os.getpid())}")
        content = os.urandom(8).hex()
        write_atomically(path, content)
        store.set("file", f"{path}\n{content}")
        rendezvous.gather("present", own=False)
        store.set("now", "")
        clock_s = time.time()
        rendezvous.gather("looked", own=False)
        path.unlink()
        return replace(report, clock_s=clock_s)
    name, content = store.get("file").decode().split("\n")
    rendezvous.send("present", {})
    store.get("now")
    clock_s = time.time()
    shares = info.local_rank != 0 or _sees(Path(name), content)
    rendezvous.send("looked", {})
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


def _try_links(rendezvous: Rendezvous, limits: Limits, result: Result | None) -> bool:
    """Check links between neighbours, then an all-reduce; adds to rank 0's result. Returns whether all is well."""
    platform, info = current_platform(), rendezvous.info
    dist.init_process_group(
        platform.backend,
        store=dist.PrefixStore("group", rendezvous.store),
        rank=info.rank,
        world_size=info.num_ranks,
        timeout=datetime.timedelta(seconds=info.timeout_s / 2),
    )
    mine = links.measure_pairs(platform, hosts=info.hosts, ranks_per_node=info.ranks_per_node)
    rendezvous.send("links", {"links": [asdict(link) for link in mine]})
    if result is not None:
        result.links = [Link(**link) for values in rendezvous.gather("links").values() for link in values["links"]]
        result.problems += judge_links(result.links, limits=limits, on_gpus=platform.is_cuda)
    return rendezvous.decide("links", _is_good(result)) and _try_all_reduce(rendezvous, platform, limits, result)


def _try_all_reduce(rendezvous: Rendezvous, platform: Platform, limits: Limits, result: Result | None) -> bool:
    gb_s, is_right, error = 0.0, False, ""
    try:
        gb_s, is_right = links.measure_all_reduce(platform)
    except RuntimeError as failure:
        error = str(failure).splitlines()[0]
    rendezvous.send("sums", {"is_right": is_right, "error": error})
    if result is not None:
        sums = rendezvous.gather("sums")
        all_right = len(sums) == rendezvous.info.num_ranks and all(values["is_right"] for values in sums.values())
        errors = tuple(f"rank {rank}: {values['error']}" for rank, values in sums.items() if values["error"])
        result.all_reduce_gb_s = gb_s
        result.problems += judge_all_reduce(gb_s, is_right=all_right, errors=errors, limits=limits, on_gpus=platform.is_cuda)
    return rendezvous.decide("sums", _is_good(result))


def describe(result: Result, info: RankInfo) -> str:
    """The result as text."""
    lines = []
    for report in result.reports:
        if report.rank % info.ranks_per_node == 0:
            lines.append(
                f"{report.host}: ranks from {report.rank}, {report.device}, {len(report.gpus)} GPUs, "
                f"{report.free_gib or 0:.0f} GiB free, {report.matmul_gflops:.0f} GFLOP/s, torch {report.versions['torch']}"
            )
    lines += [f"{link.first} - {link.second}: {link.error or f'{link.gb_s:.2f} GB/s'}" for link in result.links]
    if result.all_reduce_gb_s:
        lines.append(f"all-reduce over {info.num_ranks} ranks: {result.all_reduce_gb_s:.2f} GB/s")
    lines += [str(problem) for problem in result.problems]
    return "\n".join([*lines, "preflight: " + ("NOT PASSED" if result.problems else "passed")])


def write_result(path: Path, result: Result) -> None:
    """Write the result as JSON, and the bad nodes in Slurm's notation to `PATH.bad_nodes` (empty if there are none)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(result), indent=2) + "\n")
    write_atomically(
        path.with_name(path.name + ".bad_nodes"), ",".join(result.bad_nodes()) + ("\n" if result.bad_nodes() else "")
    )
