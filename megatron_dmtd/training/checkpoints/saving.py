"""Writing checkpoints: Megatron's `torch_dist` files, in the background or not, visible only when they are complete.

A save has three parts. `Saver.start` gathers the state and copies it to host memory; only this blocks training. A forked
process per rank then writes the rank's files, waits until they are on the disk and takes their checksums. `Saver.finish` lets
rank 0 write what describes the whole, rename the directory and point `latest` at it. One save at a time: starting another waits
for the last.

A forked process sees the state as it was at the fork, at no cost beyond the pages that training changes meanwhile (CPU) or the
host copy (GPU). Whatever fails on one rank's disk is raised on all of them, at the same place.
"""

from __future__ import annotations

import functools
import gc
import io
import multiprocessing
import os
import pickle
import queue
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from megatron_dmtd.config import CheckpointConfig, to_yaml
from megatron_dmtd.errors import CheckpointError
from megatron_dmtd.infra.checksums import write_checksums
from megatron_dmtd.infra.digests import sha256_of_file
from megatron_dmtd.infra.directories import remove
from megatron_dmtd.infra.files import write_durably
from megatron_dmtd.infra.processes import die_with
from megatron_dmtd.training import exit_codes
from megatron_dmtd.training.checkpoints import paths
from megatron_dmtd.training.checkpoints.sharded_state import METADATA, whole_state
from megatron_dmtd.training.health.consensus import any_rank, broadcast_from_first, gathered_on_first
from megatron_dmtd.training.progress import Progress
from megatron_dmtd.training.state import RunState

COMMON_FILE = "common.pt"
_POLL_S = 0.02


class SaveError(CheckpointError):
    """A checkpoint that could not be written. The last complete one stands."""

    exit_status = exit_codes.NOT_SAVED


def _error(root: Path, faults: list[str]) -> SaveError:
    return SaveError(
        found=f"no checkpoint could be written to {root}: " + "; ".join(faults),
        required="a folder that takes the whole checkpoint",
        remedy="make room, or repair the folder, and start again: the run continues from its last complete checkpoint",
    )


class _Strategy(TorchDistSaveShardedStrategy):
    """Megatron's strategy, which also hands over what our own code needs to finish the checkpoint."""

    writer: Any = None
    global_metadata: Any = None

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> Any:
        self.writer, self.global_metadata = writer, save_state_dict_ret[1]
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)


class _NoQueue:
    """In place of the queue through which Megatron's writer reports: we have a pipe.

    Megatron would start a manager process for it, on a GPU by importing the program again (10 s and more at each run's first
    save), and a scheduler's SIGTERM to all processes would end that manager in the middle of the save that the signal asks for.
    """


def _write_files(parent: int, write: Callable[..., None], rank: int, buckets: list[Any], report: Connection) -> None:
    """The background process: write this rank's files, and report Megatron's results, the digests and what went wrong."""
    die_with(parent)  # a killed rank must leave no writer behind
    gc.disable()  # it would free tensors of the parent's GPU, of which this process knows nothing
    # Megatron writes from processes of its own. A killed writer may leave them waiting for it, holding the report's pipe open.
    os.register_at_fork(after_in_child=functools.partial(die_with, os.getpid()))
    torch.set_num_threads(1)  # threads of the parent do not exist here, and waiting for them would never end
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    write(rank, buckets, results)
    written = results.get_nowait()
    fault = f"{type(written).__name__}: {written}" if isinstance(written, Exception) else ""
    digests: dict[str, str] = {}
    try:
        digests = {} if fault else {name: sha256_of_file(Path(path)) for path, name, _ in buckets}
    except OSError as error:
        fault = str(error)
    report.send_bytes(pickle.dumps((None if fault else written, digests, fault)))
    report.close()


@dataclass(kw_only=True, slots=True)
class _Running:
    """A save in progress on this rank."""

    step: int
    partial: Path
    strategy: _Strategy
    common: bytes
    """The state that is not sharded, as bytes of `common.pt`; rank 0 writes it."""
    config_yaml: str
    process: Any
    """Writes this rank's files; None where the rank has none."""
    host_copy: list[Any]
    """What is being written. Of a GPU it is pinned memory, which a fork need not copy: let go of, torch would use it again."""
    report: Connection | None

    def is_writing(self) -> bool:
        return self.report is not None and not self.report.poll()

    def collect(self) -> tuple[Any, dict[str, str], str]:
        """Megatron's write results, digests by file name, and the fault or an empty string. Waits for the process."""
        if self.report is None:
            return {}, {}, ""
        try:
            written, digests, fault = pickle.loads(self.report.recv_bytes())
        except EOFError:
            written, digests, fault = None, {}, ""
        self.report.close()
        self.process.join()
        if written is None and not fault:
            fault = f"the writing process ended with status {self.process.exitcode}"
        return written, digests, fault


class Saver:
    """Writes one run's checkpoints. All ranks call every method together, except `is_writing`."""

    def __init__(self, run: RunState, directory: str | Path, *, on_progress: Callable[[], None] = lambda: None) -> None:
        """`on_progress` is called while `finish` waits, whenever files have grown: a slow disk is not a dead one."""
        self._run = run
        self._on_progress = on_progress
        self._root = Path(directory)
        self._settings: CheckpointConfig = run.config.checkpoint
        self._running: _Running | None = None
        self._is_first_rank = torch.distributed.get_rank() == 0
        self._leftovers_removed = False
        self.blocking_s = 0.0
        """Seconds that the last `start` took."""

    @property
    def is_active(self) -> bool:
        """Whether a save has been started and not finished."""
        return self._running is not None

    @property
    def is_writing(self) -> bool:
        """Whether this rank's files are still being written."""
        return self._running is not None and self._running.is_writing()

    def start(self, progress: Progress) -> None:
        """Copy the state and begin to write it, after finishing an earlier save.

        Raises `SaveError` on all ranks if the earlier one failed or no directory can be made.
        """
        self.finish()
        started = time.perf_counter()
        partial = self._make_partial()
        state = whole_state(self._run, progress, is_loading=False, with_random_state=True)
        state["content_metadata"] = dict(METADATA)
        sharded, common = save_preprocess(state, True)
        strategy = _Strategy("torch_dist", 1)
        filesystem_async._results_queue = _NoQueue()
        request = strategy.async_save(sharded, str(partial))
        buffer = io.BytesIO()
        if self._is_first_rank:
            torch.save(common, buffer)
        host_copy = request.preload_fn() if request.async_fn is not None else []
        process, report = self._fork(request, host_copy)
        self._running = _Running(
            step=self._run.step,
            partial=partial,
            strategy=strategy,
            common=buffer.getvalue(),
            config_yaml=to_yaml(self._run.config),
            process=process,
            host_copy=host_copy,
            report=report,
        )
        self.blocking_s = time.perf_counter() - started

    def _make_partial(self) -> Path:
        """A new directory for the step, made by rank 0 and known to all."""
        name, fault = "", ""
        if self._is_first_rank:
            name = paths.partial_directory_name(self._run.step)
            try:
                if not self._leftovers_removed:
                    paths.remove_leftovers(self._root)
                    self._leftovers_removed = True
                (self._root / name).mkdir(parents=True)
            except OSError as error:
                fault = str(error)
        name, fault = broadcast_from_first((name, fault))
        if fault:
            raise _error(self._root, [fault])
        return self._root / name

    @staticmethod
    def _fork(request: Any, buckets: list[Any]) -> tuple[Any, Connection | None]:
        """`buckets` are in host memory; on a CPU they are the tensors themselves, which the fork keeps as they are."""
        if request.async_fn is None:
            return None, None
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        arguments = (os.getpid(), request.async_fn, torch.distributed.get_rank(), buckets, sender)
        process = context.Process(target=_write_files, args=arguments, name="checkpoint writer")
        process.start()
        sender.close()
        return process, receiver

    def finish(self) -> Path | None:
        """Wait for the save in progress and make it visible. Its directory, or None if there was none.

        Raises `SaveError` on all ranks if any of them could not write; then nothing of the save is left.
        """
        if self._running is None:
            return None
        written = 0
        while any_rank((self.is_writing,), device=self._run.platform.device)[0]:
            if (size := sum(path.stat().st_size for path in self._running.partial.iterdir())) > written:
                written = size
                self._on_progress()
            time.sleep(_POLL_S)
        running, self._running = self._running, None
        reports = gathered_on_first(running.collect())
        final, faults = broadcast_from_first(self._complete(running, reports) if self._is_first_rank else None)
        if faults:
            raise _error(self._root, faults)
        return final

    def _complete(self, running: _Running, reports: list[Any]) -> tuple[Path | None, list[str]]:
        """Rank 0: write what describes the whole, give it its name, remove what is superfluous. The directory, and the faults."""
        faults = [f"rank {rank}: {fault}" for rank, (_, _, fault) in enumerate(reports) if fault]
        if not faults:
            try:
                return self._publish(running, reports), []
            except (OSError, RuntimeError) as error:  # RuntimeError: how torch words a disk that refuses
                faults = [f"rank 0: {error}"]
        shutil.rmtree(running.partial, ignore_errors=True)
        return None, faults

    def _publish(self, running: _Running, reports: list[Any]) -> Path:
        partial, strategy = running.partial, running.strategy
        write_durably(partial / COMMON_FILE, running.common)
        write_durably(partial / paths.CONFIG_FILE, running.config_yaml.encode())
        results = [[item for bucket in written.values() for item in bucket] for written, _, _ in reports]
        strategy.writer.finish(strategy.global_metadata, results)
        save_config(CheckpointingConfig(strategy.backend, strategy.version), str(partial))
        write_checksums(partial, {name: digest for _, digests, _ in reports for name, digest in digests.items()})
        final = paths.publish(partial, running.step)
        keep = {"keep_last": self._settings.keep_last, "keep_every": self._settings.keep_every}
        for directory in paths.superfluous(self._root, step=running.step, **keep):
            remove(directory)
        return final

    def save(self, progress: Progress) -> Path:
        """`start` and `finish`."""
        self.start(progress)
        final = self.finish()
        assert final is not None
        return final

    def abandon(self) -> None:
        """End this rank's writing process and leave the partial directory to the next run. Not collective: for a failing run."""
        if self._running is not None and self._running.process is not None:
            self._running.process.kill()
            self._running.process.join()
        self._running = None
