"""Exit statuses of `tools/train.py`. Imports nothing heavy."""

from __future__ import annotations

DONE = 0
UNEXPECTED = 1
REFUSED = 2
STOPPED = 3
NON_FINITE = 4
STALLED = 5
NOT_SAVED = 6
NOT_LOGGED = 7

MEANINGS = {
    DONE: "done: the run reached training.steps",
    UNEXPECTED: "an unexpected error: the traceback says where",
    REFUSED: "refused before training: the message says what to change",
    STOPPED: "stopped by Ctrl-C (SIGINT), SIGTERM or SIGUSR1 after a save: start the same command again to continue",
    NON_FINITE: "a loss or gradient was not finite: do not restart blindly, see the message and the bad_step file",
    STALLED: "the watchdog ended a job in which a rank stalled: its report names the rank",
    NOT_SAVED: "a checkpoint could not be written: the last complete one is kept",
    NOT_LOGGED: "the log could not be written: the state is saved; make room and start the same command again",
}


def describe() -> str:
    """One line per exit status, for `--help`."""
    lines = [f"  {code}  {meaning}" for code, meaning in MEANINGS.items()]
    return "exit status:\n" + "\n".join(lines) + "\n  128 + n  a second signal n ended the process at once"
