"""Several ranks as forked processes: importing Megatron once instead of once per rank makes a layout test take a second.

The parent imports Megatron and never joins a process group; children rendezvous through a file, run one function each, and hand
back what it returns. A child that fails or hangs ends the test with its traceback, and nothing of it is left behind.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from megatron_dmtd.platform import prepare_megatron

TIMEOUT_S = 240.0


def _child(
    rank: int, world_size: int, store: str, pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.setsid()
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)})
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(TIMEOUT_S - 5, file=sys.__stderr__)  # where a rank hangs, before the parent gives it up
    try:
        torch.distributed.init_process_group(
            "gloo",
            store=torch.distributed.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=TIMEOUT_S),
        )
        pipe.send((True, pickle.dumps(function(*arguments))))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)


def _kill(processes: list[Any]) -> None:
    for process in processes:
        # A rank that has ended may have left helpers: its group goes, whether or not it still leads it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.join(10)


def _refuse_groups_of_this_process() -> None:
    """Megatron keeps some groups when it leaves them. A child that lets go of one waits for the threads that the parent's had."""
    from megatron.core import parallel_state

    kept = [name for name, value in vars(parallel_state).items() if isinstance(value, torch.distributed.ProcessGroup)]
    assert not kept, f"a test joined Megatron's groups in this process and not in a child: {kept}"


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run `function(*arguments)` on `world_size` ranks joined by gloo; its results by rank."""
    assert not torch.distributed.is_initialized(), "the parent must not be a rank: its children would inherit the group"
    prepare_megatron()
    _refuse_groups_of_this_process()
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_child, args=(rank, world_size, str(Path(folder) / "store"), sender, function, arguments), daemon=False
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        try:
            return _collect(pipes)
        finally:
            _kill(processes)


def _collect(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"ranks {sorted(set(range(len(pipes))) - set(results))} did not finish in {TIMEOUT_S} s")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                succeeded, payload = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                raise AssertionError(f"rank {rank} died silently") from None
            if not succeeded:
                raise AssertionError(f"rank {rank} failed:\n{payload}")
            results[rank] = pickle.loads(payload)
    return [results[rank] for rank in range(len(pipes))]
