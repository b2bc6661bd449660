"""Whole checkpoints as values that can be compared bit for bit, and the run as users start it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_dmtd.config import Config, to_yaml

ROOT = Path(__file__).parents[2]
#: generous: the machines that run tests are shared
PATIENCE_S = 240.0


def tensors_of(step_directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor that a checkpoint holds: weights, fp32 copies and Adam's moments."""
    metadata = dcp.FileSystemReader(str(step_directory)).read_metadata()
    wanted = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(wanted, storage_reader=dcp.FileSystemReader(str(step_directory)), no_dist=True)
    return wanted


def objects_of(step_directory: Path) -> dict[str, Any]:
    """Every object that a checkpoint holds in addition to tensors: generator states among them."""
    metadata = dcp.FileSystemReader(str(step_directory)).read_metadata()
    found = {}
    for index, place in metadata.storage_data.items():
        if not isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata):
            data = (step_directory / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
            found[index.fqn] = torch.load(io.BytesIO(data), weights_only=False)
    return found


def common_of(step_directory: Path) -> dict[str, Any]:
    """The state that every rank shares: scheduler, counters, parameter groups."""
    return torch.load(step_directory / "common.pt", weights_only=False)


def same(first: Any, second: Any) -> bool:
    """Whether two nested values agree in every bit."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return isinstance(second, dict) and first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(same(one, other) for one, other in zip(first, second))
    if isinstance(first, io.BytesIO):
        return first.getvalue() == second.getvalue()
    return bool(first == second)


def assert_same_checkpoint(first: Path, second: Path) -> None:
    """Assert that two checkpoints hold the same run, bit for bit, Adam's moments and generator states included."""
    for read in (tensors_of, objects_of, common_of):
        one, other = read(first), read(second)
        assert one.keys() == other.keys() and one, (read.__name__, one.keys() ^ other.keys())
        different = [key for key in one if not same(one[key], other[key])]
        assert not different, (read.__name__, different)
    moments = [key for key in tensors_of(first) if "exp_avg" in key]
    assert moments, "a checkpoint without Adam's moments proves nothing"


class Job:
    """`tools/train.py`, or another program, as one or several processes, as a scheduler starts them."""

    def __init__(self, config: Config, folder: Path, *, ranks: int = 1, program: Sequence[str] = ("tools/train.py",)) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(to_yaml(config))
        self.outputs = [folder / f"output_{rank}.txt" for rank in range(ranks)]
        self.processes = []
        store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        for rank, output in enumerate(self.outputs):
            environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
            if ranks > 1:
                environment |= store | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            with open(output, "w") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, *program, "--config", str(folder / "config.yaml")],
                        cwd=ROOT,
                        env=environment,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def output(self, rank: int = 0) -> str:
        """What a rank has printed so far."""
        return self.outputs[rank].read_text()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; fail with the output if a process ends first or it takes too long."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            ended = [process for process in self.processes if process.poll() is not None]
            assert not ended and time.monotonic() < deadline, "\n".join(self.output(rank) for rank in range(len(self.outputs)))
            time.sleep(0.01)

    def wait(self) -> list[int]:
        """Exit status of each rank, when all have ended."""
        deadline = time.monotonic() + PATIENCE_S
        return [process.wait(timeout=max(1.0, deadline - time.monotonic())) for process in self.processes]

    def send(self, signal_number: int, *ranks: int) -> None:
        """Send a signal to some ranks, or to all."""
        for rank, process in enumerate(self.processes):
            if not ranks or rank in ranks:
                process.send_signal(signal_number)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
