"""A pool of processes that turn blocks into results, in order, and never outlive the process that started them.

Each worker has its own pipe and inherits nothing else (`spawn`), so it ends when its parent does, even by SIGKILL: an idle worker
reads the end of its pipe, and on Linux the kernel ends a busy one. The number of tasks in flight is bounded, so memory does not
grow with the input. The module knows neither tokens nor files.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from megatron_dmtd.errors import DataError, DMTDError
from megatron_dmtd.infra.processes import die_with

Task = TypeVar("Task")
Result = TypeVar("Result")

#: results per worker that may wait for an earlier one
_AHEAD = 3


def _serve(connection: Connection, parent_pid: int, make: Callable[[Any], Callable[[Any], Any]], argument: Any) -> None:
    """A worker: results for tasks until the pipe ends."""
    die_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears of Ctrl-C and closes the pipe
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            work = make(argument)
            while True:
                connection.send(("result", work(connection.recv())))
        except DMTDError as error:
            connection.send(("refused", (type(error), error.found, error.required, error.remedy)))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except BaseException:
            connection.send(("crashed", traceback.format_exc()))


class WorkerCrashError(RuntimeError):
    """A fault of this library in a worker; the message is its traceback."""


class WorkerPool(Generic[Task, Result]):
    """`num_workers` processes that each call `make(argument)` once, and its result for each task."""

    def __init__(self, num_workers: int, make: Callable[[Any], Callable[[Task], Result]], argument: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        try:
            for _ in range(num_workers):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, os.getpid(), make, argument), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> WorkerPool[Task, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()

    def ordered(self, tasks: Iterable[Task]) -> Iterator[Result]:
        """The results of `tasks`, in their order. Tasks are drawn as workers become free, and never far ahead."""
        numbered = enumerate(tasks)
        idle: deque[Connection] = deque(self._connections)
        busy: dict[Connection, int] = {}
        done: dict[int, Result] = {}
        wanted, exhausted = 0, False
        while True:
            while idle and not exhausted and len(busy) + len(done) < _AHEAD * len(self._connections):
                number, task = next(numbered, (-1, None))
                if number < 0:
                    exhausted = True
                    break
                connection = idle.popleft()
                self._send(connection, task)
                busy[connection] = number
            while wanted in done:
                yield done.pop(wanted)
                wanted += 1
            if not busy:
                if exhausted:
                    return
                continue
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                done[busy.pop(ready)] = self._receive(ready)
                idle.append(ready)

    def _send(self, connection: Connection, task: Task | None) -> None:
        try:
            connection.send(task)
        except (BrokenPipeError, ConnectionResetError):
            self._receive(connection)  # it died, perhaps after a last message

    def _receive(self, connection: Connection) -> Any:
        try:
            kind, value = connection.recv()
        except (EOFError, ConnectionResetError):
            process = self._processes[self._connections.index(connection)]
            process.join(10)
            raise DataError(
                found=f"a worker process that ended with exit code {process.exitcode}",
                required="workers that finish (-9 is often the kernel, out of memory)",
                remedy="run the same command again, with fewer --workers: it continues where it stopped",
            ) from None
        if kind == "refused":
            error, found, required, remedy = value
            raise error(found=found, required=required, remedy=remedy)
        if kind == "crashed":
            raise WorkerCrashError(value)
        return value
