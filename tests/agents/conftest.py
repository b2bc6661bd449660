"""A small model and a short trajectory of real text for replays."""

from pathlib import Path

import pytest

import megatron_dmtd
from megatron_dmtd.agents.example import example_trajectory
from megatron_dmtd.agents.example_model import write_example_model


@pytest.fixture(scope="session")
def record():
    """16 tool responses, some of parallel calls."""
    folder = Path(megatron_dmtd.__file__).parent / "agents"
    return example_trajectory(responses=16, lines=5, folder=folder)


@pytest.fixture(scope="session")
def model_folder(record, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("agents") / "model"
    write_example_model(folder, record, hidden_size=32, num_layers=2, vocab_size=1024)
    return folder
