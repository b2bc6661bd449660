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


_COMMAND = """
import argparse, os, sys
from megatron_dmtd.infra.console import ending_quietly
def command():
    {body}
sys.exit(ending_quietly(command))
"""


def command_status(body: str, *, reader_stays: bool) -> tuple[int, bytes]:
    """How a command ends whose output is read, or not."""
    reader, writer = os.pipe()
    if not reader_stays:
        os.close(reader)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND.format(body=body)], stdout=writer, stderr=subprocess.PIPE, env=environment
    )
    os.close(writer)
    return done.returncode, done.stderr


def test_a_command_whose_reader_is_gone_ends_quietly() -> None:
    assert command_status("print('x' * 100_000); return 3", reader_stays=False) == (0, b"")
    assert command_status("print('x'); return 3", reader_stays=False) == (0, b"")
    assert command_status("argparse.ArgumentParser().parse_args(['--help'])", reader_stays=False) == (0, b"")


def test_a_command_keeps_its_status_and_other_pipes_their_errors() -> None:
    assert command_status("print('x'); return 3", reader_stays=True) == (3, b"")
    status, errors = command_status("raise BrokenPipeError('of a worker')", reader_stays=True)
    assert status == 1 and b"of a worker" in errors
