"""The tests' own cluster: whatever happens to the session, nothing of it stays behind."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.conftest import ROOT
from tests.support.slurm import wait_until

pytestmark = pytest.mark.slurm

_SESSION = """
import sys, time
from pathlib import Path
from tests.support.slurm import running_cluster
with running_cluster(Path(sys.argv[1]), num_nodes=2) as cluster:
    cluster.call("sbatch", "--nodes=2", "--output=/dev/null", "--wrap=srun sleep 1234", cwd=Path(sys.argv[1]))
    deadline = time.monotonic() + 60
    while cluster.job("1")["JobState"] != "RUNNING":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    time.sleep(1)
    print("up", flush=True)
    time.sleep(300)
"""


def processes_of(folder: Path) -> set[str]:
    """Processes that were started with this cluster's configuration, jobs and their steps included."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(folder).encode() in (entry / "environ").read_bytes():
                found.add((entry / "comm").read_text().strip())
        except OSError:  # gone meanwhile, or not ours to read
            continue
    return found


def test_a_session_killed_with_9_takes_daemons_and_jobs_with_it(cluster, tmp_path):
    folder = tmp_path / "lab"
    session = subprocess.Popen([sys.executable, "-c", _SESSION, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert session.stdout is not None and session.stdout.readline() == "up\n"
        assert {"munged", "slurmctld", "slurmd", "sleep"} <= processes_of(folder)
        session.send_signal(signal.SIGKILL)
        # reading to the end: whoever still held this pipe would keep a continuous integration job open
        assert session.communicate(timeout=30)[0] == ""
        wait_until(lambda: not processes_of(folder), timeout_s=15, what="the end of all processes")
    finally:
        session.kill()
