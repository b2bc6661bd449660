"""`tools/train.py` with trouble in one rank: run as a program by tests, with TROUBLE in the environment.

`freeze RANK STEP`: the rank's main thread sleeps for ever while it reads the data of a step.
`nan RANK STEP`: a gradient of that rank becomes NaN in that step (counted in this process, from 1).
"""

import itertools
import os
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def _freeze_for_ever() -> None:
    while True:
        time.sleep(1)


def _with_trouble(kind: str, step: int, real_train_step: Any) -> Any:
    steps = itertools.count(1)

    def frozen(iterator: Iterator[Any]) -> Iterator[Any]:
        _freeze_for_ever()
        yield from iterator

    def train_step(run: Any, iterator: Iterator[Any]) -> Any:
        if next(steps) != step:
            return real_train_step(run, iterator)
        if kind == "freeze":
            return real_train_step(run, frozen(iterator))
        parameter = next(parameter for model in run.models for parameter in model.parameters())
        handle = parameter.register_hook(lambda gradient: gradient * float("nan"))
        try:
            return real_train_step(run, iterator)
        finally:
            handle.remove()

    return train_step


def _main() -> None:
    kind, rank, step = os.environ["TROUBLE"].split()
    if os.environ.get("RANK", "0") == rank:
        from megatron_dmtd.platform import prepare_megatron

        prepare_megatron()
        from megatron_dmtd.training import loop

        loop.train_step = _with_trouble(kind, int(step), loop.train_step)
    program = str(Path(__file__).parents[2] / "tools" / "train.py")
    sys.argv[0] = program
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    _main()
