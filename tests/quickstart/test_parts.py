import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_dmtd.quickstart.parts import Part, PartError, Parts, run_command
from tests.infra.test_processes import is_running
from tests.support.checkpoints import ROOT


def make_part(path: Path, inputs: dict, calls: list[str]) -> Part:
    def work() -> None:
        calls.append("worked")
        path.write_text("x")

    return Part(name="a part", inputs=inputs, outputs=(path,), work=work)


def test_a_part_is_done_once_and_again_when_its_inputs_change(tmp_path):
    calls, said = [], []
    parts, path = Parts(tmp_path, say=said.append), tmp_path / "result"
    parts.run(make_part(path, {"steps": (1, 2)}, calls))
    parts.run(make_part(path, {"steps": (1, 2)}, calls))
    assert calls == ["worked"] and said == ["a part: already done"]
    parts.run(make_part(path, {"steps": (1, 3)}, calls))
    assert calls == ["worked"] * 2
    path.unlink()
    parts.run(make_part(path, {"steps": (1, 3)}, calls))
    assert calls == ["worked"] * 3


def test_an_interrupted_part_finds_what_it_left_and_an_outdated_one_does_not(tmp_path):
    parts, path, seen = Parts(tmp_path, say=print), tmp_path / "result", []

    def fail() -> None:
        seen.append(path.exists())
        path.write_text("half")
        raise KeyboardInterrupt

    for inputs in (1, 1, 2):
        with pytest.raises(KeyboardInterrupt):
            parts.run(Part(name="a part", inputs={"value": inputs}, outputs=(path,), work=fail))
    assert seen == [False, True, False]


def test_a_torn_stamp_means_not_done(tmp_path):
    calls, path = [], tmp_path / "result"
    Parts(tmp_path, say=print).run(make_part(path, {}, calls))
    (tmp_path / ".parts" / "a-part.json").write_text('{"inputs": {')
    Parts(tmp_path, say=print).run(make_part(path, {}, calls))
    assert calls == ["worked"] * 2


def test_a_failed_command_shows_the_end_of_its_log_and_where_it_is(tmp_path):
    log = tmp_path / "logs" / "command.log"
    code = "import sys; print('the reason'); sys.exit(7)"
    with pytest.raises(PartError, match=r"failed \(exit status 7\): the reason") as caught:
        run_command([sys.executable, "-c", code], log=log, cwd=tmp_path, environment=os.environ, poll_s=0.01)
    assert "the reason" in caught.value.found and str(log) in caught.value.remedy


@pytest.mark.multiprocess
def test_what_ranks_say_is_shown_and_not_what_torchrun_says(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    training = ["tools/train.py", "--config", "examples/quickstart/base.yaml", "--optimizer.lr", "-1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with pytest.raises(PartError) as caught:
        run_command([*launcher, *training], log=tmp_path / "log", cwd=ROOT, environment=environment)
    assert caught.value.found == "tools/train.py failed (exit status 1): optimizer.lr = -1.0"
    assert caught.value.required == "a number above 0" and caught.value.remedy.startswith("set optimizer.lr to such a number; ")


def test_an_interruption_ends_the_command(tmp_path):
    def interrupt() -> None:
        raise KeyboardInterrupt

    log = tmp_path / "command.log"
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    polls = iter(range(10**6))

    def watch() -> None:
        if next(polls) and len(log.read_text().splitlines()) > 1:
            interrupt()

    with pytest.raises(KeyboardInterrupt):
        run_command([sys.executable, "-c", code], log=log, cwd=tmp_path, environment=os.environ, watch=watch, poll_s=0.01)
    pid = int(log.read_text().splitlines()[-1])
    assert not Path(f"/proc/{pid}").exists()


def test_time_adds_up_over_interruptions_and_a_finished_part_remembers_it(tmp_path):
    calls = []

    def work() -> None:
        time.sleep(0.1)
        calls.append("worked")
        if len(calls) < 3:
            raise KeyboardInterrupt
        (tmp_path / "result").touch()

    part = Part(name="a part", inputs={}, outputs=(tmp_path / "result",), work=work)
    parts = Parts(tmp_path, say=print)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            parts.run(part)
    seconds = parts.run(part)
    assert 0.3 <= seconds < 3 and parts.run(part) == seconds and len(calls) == 3


def test_a_part_that_makes_nothing_is_a_fault_of_the_part(tmp_path):
    part = Part(name="a part", inputs={}, outputs=(tmp_path / "never",), work=lambda: None)
    with pytest.raises(AssertionError, match="a part ended without"):
        Parts(tmp_path, say=print).run(part)


def test_a_command_is_watched_while_it_runs_and_logged_with_its_own_line(tmp_path):
    log, watched = tmp_path / "command.log", []
    code = "import time; time.sleep(0.2); print('done')"
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    run_command(
        [sys.executable, "-c", code], log=log, cwd=tmp_path, environment=environment, watch=lambda: watched.append(1), poll_s=0.02
    )
    assert len(watched) > 2
    assert log.read_text() == f"$ {sys.executable} -c {code}\ndone\n"


FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
print(os.getpid(), child.pid, flush=True)
time.sleep(300)
"""


def test_an_interruption_ends_whatever_the_command_started(tmp_path, capsys):
    log = tmp_path / "command.log"

    def watch() -> None:
        if log.read_text().splitlines()[-1].replace(" ", "").isdigit():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_command([sys.executable, "-c", FAMILY], log=log, cwd=tmp_path, environment=os.environ, watch=watch, poll_s=0.01)
    pids = [int(word) for word in log.read_text().splitlines()[-1].split()]
    assert len(pids) == 2 and not any(is_running(pid) for pid in pids)
    assert "interrupted: waits until this part has stopped" in capsys.readouterr().err


def test_a_command_ends_with_the_process_that_runs_it(tmp_path):
    """Even if that process is killed: what it started learns of it from the kernel."""
    log = tmp_path / "command.log"
    code = (
        "import os, sys; from pathlib import Path; from megatron_dmtd.quickstart.parts import run_command; "
        f"run_command([sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(300)'], "
        f"log=Path({str(log)!r}), cwd=Path('/'), environment=os.environ)"
    )
    runner = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 60
    while not (log.is_file() and log.read_text().splitlines()[-1].isdigit()) and time.monotonic() < deadline:
        time.sleep(0.02)
    pid = int(log.read_text().splitlines()[-1])
    assert is_running(pid)
    runner.kill()
    runner.wait()
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(pid)
