"""Processes that never outlive the one that started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import psutil

_PR_SET_PDEATHSIG = 1
#: seconds that the kernel may take to remove a killed process
_DEATH_S = 5.0
# Looked up here: a process that has just been forked should do as little as possible.
_prctl: Callable[[int, int], int] | None = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def die_with(parent_pid: int, *, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent ends, even by SIGKILL.

    Call it first, with the parent's number. A program started by this process keeps the request.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:  # it died while this process was starting
        os._exit(1)


#: in the environment of what a command starts: the number of the process at whose end it must end too
STARTED_BY = "MEGATRON_DMTD_STARTED_BY"


def end_if_orphaned() -> None:
    """End this process if the one that `STARTED_BY` names is gone: it died before anybody could tell this one."""
    starter = os.environ.get(STARTED_BY, "")
    if starter.isdecimal() and not psutil.pid_exists(int(starter)):
        os._exit(1)


def end_family(process: subprocess.Popen[bytes], *, patience_s: float) -> None:
    """End a process and everything that it started: SIGTERM to the process, then SIGKILL to whoever remains.

    An exception meanwhile, such as the KeyboardInterrupt of a second Ctrl-C, ends them at once and is raised.
    """
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    try:
        process.terminate()
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()
        process.wait()
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # psutil does not mistake another one that got its number
                member.kill()
        psutil.wait_procs(family, timeout=_DEATH_S)
