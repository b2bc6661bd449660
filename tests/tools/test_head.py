"""`| head`: a command whose reader has gone ends quietly, help included."""

import os
import subprocess
import sys

import pytest

from tests.support.checkpoints import ROOT
from tests.tools.test_start import COMMANDS


def without_reader(*words: str) -> tuple[int, str]:
    """Status and standard error of a command whose output nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_quietly_once_its_reader_is_gone(command):
    assert without_reader(command, "--help") == (0, "")


@pytest.mark.parametrize(
    "words",
    [
        ("tools/inspect_mask.py", "--variant", "bidirectional-refresh", "--documents", "64,64"),
        ("tools/plan.py", "--config", "examples/quickstart/base.yaml", "--json"),
    ],
    ids=["mask", "plan"],
)
def test_output_ends_quietly_once_its_reader_is_gone(words):
    assert without_reader(*words) == (0, "")
