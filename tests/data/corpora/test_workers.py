"""Worker processes: order, bounds, refusals, crashes, and that none outlives its parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_dmtd.data.corpora.workers import WorkerCrashError, WorkerPool
from megatron_dmtd.errors import DataError

pytestmark = pytest.mark.multiprocess


def square_slowly(delay_s):
    def work(number):
        time.sleep(delay_s if number % 3 == 0 else 0)
        return number * number, os.getpid()

    return work


def misbehave(how):
    def work(number):
        if number == 2 and how == "refuse":
            raise DataError(found="two", required="another", remedy="count on")
        if number == 2 and how == "crash":
            raise ZeroDivisionError("a fault")
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    return work


def refuse_to_start(_):
    raise DataError(found="no start", required="a start", remedy="none")


def test_results_keep_the_order_of_the_tasks_whoever_is_faster():
    with WorkerPool(2, square_slowly, 0.02) as pool:
        results = list(pool.ordered(range(20)))
    assert [square for square, _ in results] == [number * number for number in range(20)]
    assert len({process for _, process in results}) == 2 and os.getpid() not in {process for _, process in results}


def test_no_more_tasks_are_drawn_than_a_few_per_worker():
    drawn = []
    with WorkerPool(1, square_slowly, 0.0) as pool:
        results = pool.ordered(drawn.append(number) or number for number in range(100))
        for _ in range(3):
            next(results)
        assert len(drawn) < 10
        results.close()


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("refuse", DataError, "found: two"),
        ("crash", WorkerCrashError, "a fault"),
        ("die", DataError, "exit code -9"),
    ],
)
def test_what_goes_wrong_in_a_worker_is_heard(how, error, message):
    with WorkerPool(2, misbehave, how) as pool:
        processes = list(pool._processes)
        with pytest.raises(error, match=message):
            list(pool.ordered(range(10)))
    assert not any(process.is_alive() for process in processes)


def test_a_worker_that_cannot_start_says_why():
    with WorkerPool(1, refuse_to_start, None) as pool, pytest.raises(DataError, match="no start"):
        list(pool.ordered(range(3)))


PARENT = """
import sys, os, time
sys.path.insert(0, {root!r})
from tests.data.corpora.test_workers import square_slowly
from megatron_dmtd.data.corpora.workers import WorkerPool
if __name__ == "__main__":
    pool = WorkerPool(2, square_slowly, 600 if {busy} else 0)
    print(*[process.pid for process in pool._processes], flush=True)
    if {busy}:
        list(pool.ordered([0, 3]))
    time.sleep(600)
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("busy", [True, False])
def test_workers_end_when_their_parent_is_killed_and_leave_its_output_closed(tmp_path, busy):
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(root=str(Path(__file__).parents[3]), busy=busy))
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2 and all(is_running(pid) for pid in workers)
    parent.kill()
    # ends only when no process holds the other end of the pipe: neither workers nor helpers
    assert parent.stdout.read() == ""
    parent.wait()
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in workers)
