"""Standard output whose reader is gone or whose disk is full."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable


def silence_stdout() -> None:
    """Let standard output take everything from now on: what is left in its buffer would fail again when the interpreter ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def ending_quietly(command: Callable[[], int]) -> int:
    """Run a command and return its exit status; 0, without a message, once the reader of its output is gone (`| head`)."""
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_is_gone():  # another pipe, of a worker process, say
            raise
        silence_stdout()
        return 0


def _reader_is_gone() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
