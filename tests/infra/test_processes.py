import os
import signal
import subprocess
import sys
import time

from tests.support.checkpoints import ROOT

_PARENT = """
import os, sys, time
from megatron_dmtd.infra.processes import die_with
parent = os.getpid()
child = os.fork()
if child == 0:
    die_with(parent)
    print(os.getpid(), flush=True)
    time.sleep(300)
time.sleep(300)
"""
_ORPHAN = """
import os
from megatron_dmtd.infra.processes import die_with
die_with(os.getppid() + 1)
print("lives", flush=True)
"""


def is_running(pid: int) -> bool:
    """Whether a process exists that is not only waiting to be reaped."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def start(program: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)


def test_a_child_ends_when_its_parent_is_killed() -> None:
    parent = start(_PARENT)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_running(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 20
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(child)
    parent.stdout.close()


def test_a_child_whose_parent_died_while_it_started_ends_at_once() -> None:
    output, _ = (orphan := start(_ORPHAN)).communicate()
    assert (output, orphan.returncode) == ("", 1)


def test_a_process_whose_starter_is_gone_ends_at_once() -> None:
    program = "from megatron_dmtd.infra.processes import end_if_orphaned; end_if_orphaned(); print('lives')"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for starter, expected in ((str(gone.pid), ("", 1)), (str(os.getpid()), ("lives\n", 0)), ("", ("lives\n", 0))):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "MEGATRON_DMTD_STARTED_BY": starter}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
        assert (done.stdout, done.returncode) == expected
