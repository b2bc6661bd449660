"""StopSignals in a process of its own, which prints what it has received."""

import os
import signal
import subprocess
import sys
import time

import pytest

from megatron_dmtd.training.health.signals import SAME_REQUEST_S
from tests.support.checkpoints import ROOT

_PROGRAM = """
import os, sys, time
from megatron_dmtd.training.health.signals import StopSignals
assert "torch" not in sys.modules
signals = StopSignals()
signals.install()
if sys.argv[1] == "over":
    signals.run_is_over()
reader, writer = os.pipe()
child = os.fork() if sys.argv[1] == "fork" else 1
if child == 0:
    os.write(writer, b"up")
    time.sleep(3)
    os._exit(7)
if sys.argv[1] == "fork":
    os.read(reader, 2)
print("ready", child, flush=True)
if sys.argv[1] == "fork":
    print(os.waitpid(child, 0)[1] >> 8, signals.received, flush=True)
while not signals.received:
    time.sleep(0.01)
print(signals.name(), flush=True)
time.sleep(1000)
"""


@pytest.fixture
def start(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    def starter(mode: str) -> "tuple[subprocess.Popen[str], int]":
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, mode], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        request.addfinalizer(process.wait)
        request.addfinalizer(process.kill)
        assert process.stdout is not None
        ready, child = process.stdout.readline().split()
        assert ready == "ready"
        return process, int(child)

    return starter


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_is_noted_and_a_later_one_ends_the_process_at_once(start, number: signal.Signals) -> None:  # type: ignore[no-untyped-def]
    process, _ = start("plain")
    process.send_signal(number)
    assert process.stdout.readline() == f"{number.name}\n"
    process.send_signal(number)  # within the time in which a launcher repeats itself
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=SAME_REQUEST_S + 0.5)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    said = "SIGINT: saves and stops after this step; once more ends at once, without a save\n" if number == signal.SIGINT else ""
    assert error == said + "SIGTERM again: ends at once, without a save\n"


def test_a_job_in_the_background_goes_on_ignoring_ctrl_c() -> None:
    program = f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{_PROGRAM}"
    process = subprocess.Popen([sys.executable, "-c", program, "plain"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "SIGTERM\n"
    finally:
        process.kill()
        process.wait()


def test_signals_change_nothing_when_the_run_is_over(start) -> None:  # type: ignore[no-untyped-def]
    process, _ = start("over")
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "SIGTERM\n"
    time.sleep(SAME_REQUEST_S + 0.2)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)


def test_a_forked_helper_ignores_the_signals_and_does_not_report_them_to_its_parent(start) -> None:  # type: ignore[no-untyped-def]
    process, child = start("fork")
    os.kill(child, signal.SIGTERM)
    os.kill(child, signal.SIGINT)
    assert process.stdout.readline() == "7 False\n"
