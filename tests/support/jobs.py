"""Whole training jobs inside forked ranks, and signals sent to them in a chosen phase."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from megatron_dmtd.config import Config
from megatron_dmtd.training.log import METRICS_FILE, read_metrics

#: per phase, a function that the main thread is in, and the file that defines it
PHASES = {
    "building data indices": ("_open_data", "loop.py"),
    "a step": ("train_step", "step.py"),
    "evaluation": ("evaluate", "step.py"),
    "a save": ("save_preprocess", "state_dict_utils.py"),
}
#: values that say how fast the machine was
_CLOCK = ("time", "elapsed_s", "step_time_s", "tokens_per_s", "memory_gib", "mfu")


def _is_in(function: str, file: str, thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_code.co_filename.endswith(os.sep + file):
            return True
        frame = frame.f_back
    return False


def _signal_in_phase(phase: str, number: int, sent: list[str]) -> None:
    main = threading.main_thread().ident or 0
    while not _is_in(*PHASES[phase], main):
        time.sleep(0.0002)
    os.kill(os.getpid(), number)
    sent.append(phase)


def run_job(
    config: Config, phase: str = "", ranks: tuple[int, ...] = (), number: int = signal.SIGTERM
) -> tuple[str, list[str], Any]:
    """A whole run as `tools/train.py` does it. How it ended, the phases in which this rank was signalled, and its values."""
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training.health.signals import StopRequested, StopSignals
    from megatron_dmtd.training.loop import run_training

    signals, sent = StopSignals(), []  # type: ignore[var-annotated]
    signals.install()
    sys.setswitchinterval(0.0005)
    if phase and int(os.environ["RANK"]) in ranks:
        threading.Thread(target=_signal_in_phase, args=(phase, number, sent), daemon=True).start()
    try:
        return "done", sent, run_training(config, prepare_megatron(), signals)
    except StopRequested as stop:
        return str(stop), sent, None


def lines_of(config: Config) -> list[dict[str, Any]]:
    """The log's lines without what depends on the clock."""
    records = read_metrics(Path(config.logging.dir) / METRICS_FILE)
    return [{name: value for name, value in record.items() if name not in _CLOCK} for record in records]
