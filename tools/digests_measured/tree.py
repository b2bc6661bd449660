"""A source tree under measurement: its commands, run in forked processes, and the training runs made so far."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .figures import Items, MeasureError

VARIANTS = ("causal-norefresh", "causal-refresh", "bidirectional-norefresh", "bidirectional-refresh")
KINDS = ("vanilla", *VARIANTS)
TIMEOUT_S = 240.0
_KILLED = -signal.SIGKILL

#: Old name -> new name of dotted options of tools/train.py and tools/plan.py that a later tree has renamed; cases use the old.
OPTION_RENAMES: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Finished:
    """What a command left behind."""

    status: int
    output: str
    errors: str


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _child(body: Callable[[], Any], log: Path, environment: Mapping[str, str], cwd: Path) -> None:
    """Run `body` in this forked process, which ends with its exit status."""
    status = 1
    try:
        os.setsid()
        for number_of_stream, suffix in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(f"{log}{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number_of_stream)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        os.environ.update(environment)
        os.chdir(cwd)
        status = body() or 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(pids: Sequence[int]) -> list[int | None]:
    """Exit statuses; None for those that had to be killed, because another one failed or the time was up."""
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while len(statuses) < len(pids) and time.monotonic() < deadline:
            for pid in set(pids) - set(statuses):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
                    if statuses[pid]:
                        deadline = min(deadline, time.monotonic() + 5)  # the others may wait for it in vain
            time.sleep(0.01)
    finally:
        for pid in set(pids) - set(statuses):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [statuses.get(pid) for pid in pids]


@dataclass
class Tree:
    """The measured tree, a scratch folder, and the training runs made in it so far."""

    root: Path
    scratch: Path
    runs: dict[tuple[str, str], Path] = field(default_factory=dict)
    num_started: int = 0

    def forked(self, body: Callable[[], Any], *, ranks: int = 1) -> Finished:
        """Run `body` in one forked process, or in several that can form a process group.

        Returns the first rank's output, or that of the first that failed.
        """
        self.num_started += 1
        logs = [self.scratch / f"process-{self.num_started}-{rank}" for rank in range(ranks)]
        store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)} if ranks > 1 else {}
        pids = []
        for rank, log in enumerate(logs):
            environment = store | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {})
            pid = os.fork()
            if not pid:
                _child(body, log, environment, self.root)
            pids.append(pid)
        statuses = _wait(pids)
        failed = [rank for rank, status in enumerate(statuses) if status]
        killed = [rank for rank, status in enumerate(statuses) if status is None]
        shown = (*failed, *killed, 0)[0]
        texts = [Path(f"{logs[shown]}{suffix}").read_text() for suffix in (".out", ".err")]
        return Finished(_KILLED if shown in killed else statuses[shown] or 0, *texts)

    def command(self, name: str, *arguments: str, ranks: int = 1, may_fail: bool = False) -> Finished:
        """Run a command of the tree as users do. Raises `MeasureError` if it fails, unless it may."""
        path = str(self.root / "tools" / f"{name}.py")

        def body() -> None:
            sys.argv = [path, *arguments]
            runpy.run_path(path, run_name="__main__")

        finished = self.forked(body, ranks=ranks)
        if finished.status and not may_fail:
            raise MeasureError(account(f"tools/{name}.py {' '.join(arguments)}", finished))
        return finished

    def computed(self, function: Callable[[], Items]) -> Items:
        """The items of `function`, computed in a forked process."""
        result = self.scratch / f"items-{self.num_started}.json"
        finished = self.forked(lambda: result.write_text(json.dumps(function())) and None)
        if finished.status:
            raise MeasureError(account("a measurement", finished))
        items: Items = json.loads(result.read_text())
        return items

    @functools.cached_property
    def corpora(self) -> list[str]:
        """Prefixes of three tiny corpora; the last is held out."""
        return [str(write_corpus(self.scratch / f"corpus-{seed}", seed=seed)) for seed in range(3)]

    @functools.cached_property
    def option_names(self) -> dict[str, str]:
        """How this tree spells the options that are renamed in some trees."""
        return spelled(OPTION_RENAMES, self.command("train", "--help").output) if OPTION_RENAMES else {}

    def arguments(self, options: Mapping[str, Any]) -> list[str]:
        """Dotted options as this tree spells them."""
        found = []
        for name, value in options.items():
            text = value if isinstance(value, str) else json.dumps(value)
            found += [f"--{self.option_names.get(name, name)}", text]
        return found


def account(what: str, finished: Finished) -> str:
    """What to say about a process that failed."""
    return f"{what}: exit status {finished.status}\n{(finished.output + finished.errors)[-3000:]}"


def spelled(renames: Mapping[str, str], help_text: str) -> dict[str, str]:
    """Each renamed option as the tree with this help text spells it."""
    known = set(re.findall(r"--([\w.]+)", help_text))
    lost = [old for old, new in renames.items() if not {old, new} & known]
    if lost:
        raise MeasureError(f"tools/train.py has neither name of {', '.join(lost)}: correct OPTION_RENAMES")
    return {old: old if old in known else new for old, new in renames.items()}


def write_corpus(prefix: Path, *, seed: int) -> Path:
    """Short documents with some structure to learn, as Megatron's IndexedDataset."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    generator = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(60):
        length = int(generator.integers(2, 70))
        builder.add_document(torch.from_numpy(1 + np.cumsum(generator.integers(0, 3, size=length)) % 90), [length])
    builder.finalize(f"{prefix}.idx")
    return prefix
