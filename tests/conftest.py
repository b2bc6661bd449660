"""Corpora that several tests read, and no GPU but for the tests that ask for one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

# Its monitor is a thread that takes the lock of all bars now and then: a child forked at that moment would wait for it for ever.
tqdm.monitor_interval = 0
# One thread: forked children of a process that used more would wait for threads that they do not have.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """All other tests say what a CPU gives, several ranks of them on whatever machine: there they must find none."""
    # A shell starts jobs in the background with SIGINT ignored, and the programs that tests interrupt would inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    words = str(config.getoption("markexpr")).replace("not gpu", "").split()
    if "gpu" not in words:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Prefixes of a training and of a held-out corpus."""
    from megatron_dmtd.platform import prepare_megatron
    from tests.support.tiny import write_corpus

    prepare_megatron()
    folder: Path = tmp_path_factory.mktemp("corpus")
    return write_corpus(folder / "train", num_documents=120), write_corpus(folder / "valid", num_documents=9, seed=1)
