"""Standard output whose reader has gone or whose disk is full."""

from __future__ import annotations

import os
import sys


def silence_stdout() -> None:
    """Let standard output take everything from now on: what is left in its buffer would fail again when the interpreter ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
