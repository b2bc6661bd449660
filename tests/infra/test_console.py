import os
import subprocess
import sys

from tests.support.checkpoints import ROOT

_PROGRAM = """
import sys
from megatron_dmtd.infra.console import silence_stdout
try:
    print("lost, with the reader gone")
    sys.stdout.flush()
except BrokenPipeError:
    {handler}
print("taken and thrown away")
"""


def status(handler: str) -> tuple[int, bytes]:
    """How a program ends whose standard output nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", _PROGRAM.format(handler=handler)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment)
    os.close(writer)
    return done.returncode, done.stderr


def test_a_silenced_output_fails_no_more_when_the_interpreter_ends() -> None:
    assert status("silence_stdout()") == (0, b"")
    returncode, errors = status("pass")
    assert returncode != 0 and b"BrokenPipeError" in errors
