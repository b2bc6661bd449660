"""SIGINT (Ctrl-C), SIGTERM and SIGUSR1: the first asks the run to save and stop, a later one ends the process at once.

The loop reads `StopSignals.received` where it is safe to stop. A thread counts the signals, so that a second one works even while
the main thread waits inside a collective that never ends. Launchers deliver one request several times (a scheduler to every
process of a job, torchrun again to each of its own): signals within `SAME_REQUEST_S` of the first are the same request.

Imports nothing heavy: the handlers are in place before the seconds that importing torch takes.
"""

from __future__ import annotations

import os
import signal
import threading
import time

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
#: seconds within which repeated signals are one request
SAME_REQUEST_S = 2.0


class StopRequested(Exception):
    """The run saved its state and stopped because of a signal."""


class StopSignals:
    """Counts the stop signals of this process. Install it once, in the main thread."""

    def __init__(self) -> None:
        self._first: tuple[signal.Signals, float] | None = None
        self._is_over = False

    @property
    def received(self) -> bool:
        """Whether this process has been asked to stop."""
        return self._first is not None

    def name(self) -> str:
        """The first signal's name; an empty string before any."""
        return self._first[0].name if self._first else ""

    def install(self) -> None:
        """Handle the signals from now on. Processes forked later ignore them: they serve a save that must finish."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # Python writes a signal's number here from the C handler: no bytecode of the main thread needs to run for that.
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            # A shell starts jobs in the background with SIGINT ignored, so that Ctrl-C ends what is in front only.
            if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        os.register_at_fork(after_in_child=_ignore_in_child)
        threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True).start()

    def run_is_over(self) -> None:
        """From now on signals change nothing: what was to be saved is saved, and the exit status is decided."""
        self._is_over = True

    def _watch(self, reader: int) -> None:
        while True:
            for number in os.read(reader, 64):
                if number in STOP_SIGNALS:
                    self._count(signal.Signals(number))

    def _count(self, received: signal.Signals) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = (received, now)
            if received == signal.SIGINT and not self._is_over:  # somebody sits there and waits
                os.write(2, b"SIGINT: saves and stops after this step; once more ends at once, without a save\n")
        elif now - self._first[1] > SAME_REQUEST_S and not self._is_over:
            os.write(2, f"{received.name} again: ends at once, without a save\n".encode())
            os._exit(128 + received)


def _ignore_in_child() -> None:
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
