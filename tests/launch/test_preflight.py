"""Preflight with real ranks on this host: passes where all is well, names the rank that never comes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.multiprocess


def preflight(
    folder: Path, *, ranks: list[int], hosts: list[str], options: tuple[str, ...] = (), **environment: str
) -> list[tuple[int, str]]:
    """`tools/preflight.py` as these ranks of a job with one rank per host; status and output of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(hosts)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tools/preflight.py"), "--hosts", ",".join(hosts), "--folder", str(folder)]
    processes = [
        subprocess.Popen(
            [*command, "--output", str(folder / "preflight.json"), *options],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": "0", "PYTHONPATH": str(ROOT)} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ranks
    ]
    try:
        outputs = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs)]


def test_two_ranks_pass_and_leave_what_they_measured(tmp_path):
    host = socket.gethostname()
    results = preflight(tmp_path, ranks=[0, 1], hosts=[host, host])
    assert [status for status, _ in results] == [0, 0], results
    assert "all-reduce over 2 ranks" in results[0][1] and "preflight: passed" in results[0][1]
    record = json.loads((tmp_path / "preflight.json").read_text())
    assert len(record["reports"]) == 2 and record["links"][0]["gb_s"] > 0 and record["all_reduce_gb_s"] > 0
    assert (tmp_path / "preflight.json.bad_nodes").read_text() == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["preflight.json", "preflight.json.bad_nodes"]


def test_a_rank_that_never_comes_is_named_by_its_node(tmp_path):
    options = ("--timeout-s", "8", "--min-free-gib", "0")
    ((status, output),) = preflight(tmp_path, ranks=[0], hosts=[socket.gethostname(), "node9"], options=options)
    assert status == 8
    assert "BAD NODE node9\n  found: no report from ranks 1" in output and "remedy: " in output
    assert (tmp_path / "preflight.json.bad_nodes").read_text() == "node9\n"


def test_a_name_that_the_node_does_not_know_is_refused_at_once(tmp_path):
    hosts = [socket.gethostname(), "node9"]
    ((status, output),) = preflight(tmp_path, ranks=[1], hosts=hosts, MASTER_ADDR="node8.invalid", SLURMD_NODENAME="node9")
    assert status == 2 and "Traceback" not in output
    assert "found: rank 1 on node9 does not know the name node8.invalid: " in output and "RENDEZVOUS=address" in output


def test_a_rank_0_that_does_not_answer_is_told_with_its_address(tmp_path):
    ((status, output),) = preflight(tmp_path, ranks=[1], hosts=["node8", "node9"], options=("--timeout-s", "3"))
    assert status == 8 and "Traceback" not in output
    assert "had no answer in 3 s from 127.0.0.1:" in output and "remedy: check that rank 0 started" in output
