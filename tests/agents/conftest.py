"""A small model and a short trajectory for replays, of sources that do not change."""

from pathlib import Path

import pytest

from megatron_dmtd.agents.example import example_trajectory
from megatron_dmtd.agents.example_model import write_example_model

WORDS = ("parse", "merge", "count", "index", "split", "check")


def _source(number: int) -> str:
    """A module whose functions call those of the next one."""
    functions = []
    for place, word in enumerate(WORDS):
        following = f"{WORDS[(place + 1) % len(WORDS)]}_lines_{(number + 1) % 5}"
        functions.append(
            f"def {word}_lines_{number}(lines, width={place + number}):\n"
            f'    """Takes the lines that {word} needs, at most {10 * place + number} of them."""\n'
            f"    kept = [line.strip() for line in lines if len(line) > {place}]\n"
            f"    total = sum(map(len, kept)) + width * {number + 3}\n"
            f"    if total > {100 * (place + 1)}:\n"
            f"        return {following}(kept[:width], width)\n"
            f"    return kept, total\n"
        )
    return "\n\n".join(functions)


@pytest.fixture(scope="session")
def record(tmp_path_factory):
    """16 tool responses, some of parallel calls."""
    folder = tmp_path_factory.mktemp("sources")
    for number in range(5):
        (folder / f"lines_{number}.py").write_text(_source(number), encoding="utf-8")
    return example_trajectory(responses=16, lines=5, folder=folder)


@pytest.fixture(scope="session")
def model_folder(record, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("agents") / "model"
    write_example_model(folder, record, hidden_size=32, num_layers=2, vocab_size=1024)
    return folder
