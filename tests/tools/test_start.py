"""Help, and refusals of settings, within two seconds of CPU, before torch is imported; `| head` ends commands quietly."""

import os
import subprocess
import sys

import pytest

from tests.support.checkpoints import ROOT

COMMANDS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("tools", "tools/bench")
    for path in (ROOT / folder).glob("*.py")
    if "__main__" in path.read_text()
)
LIMIT_S = 2.0
RECIPE = ("--config", "examples/quickstart/base.yaml")


def started(*words: str) -> tuple[int, str, float]:
    """Status, output and seconds of CPU of a command."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, output, usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("command", COMMANDS)
def test_help_comes_at_once(command):
    status, output, cpu_s = started(command, "--help")
    assert status == 0 and "usage:" in output and cpu_s < LIMIT_S, (cpu_s, output[-500:])


REFUSED = {
    "train-name": ("tools/train.py", *RECIPE, "--optimizer.nope", "1"),
    "train-value": ("tools/train.py", *RECIPE, "--optimizer.lr", "-1"),
    "train-rule": ("tools/train.py", *RECIPE, "--data.seq_length", "255"),
    "plan": ("tools/plan.py", *RECIPE, "--optimizer.lr", "x"),
    "generate-value": ("tools/generate.py", "nowhere", "text", "--temperature", "-1"),
    "generate-engine": ("tools/generate.py", "nowhere", "text", "--max-batch", "0"),
    "generate-model": ("tools/generate.py", "nowhere", "text"),
    "serve-port": ("tools/serve.py", "nowhere", "--port", "99999"),
    "serve-engine": ("tools/serve.py", "nowhere", "--port", "0", "--max-batch", "0"),
    "serve-model": ("tools/serve.py", "nowhere", "--port", "0"),
    "evaluate": ("tools/evaluate.py", "nowhere", "--text", "a", "--output", "/tmp/never"),
    "convert": ("tools/convert.py", "import", "a", "b", "--variant", "causal-refresh"),
    "mask": ("tools/inspect_mask.py", "--documents", "0"),
    "preprocess": ("tools/preprocess.py", "--input", "nowhere", "--tokenizer", "a", "--output", "b"),
}


@pytest.mark.parametrize("words", REFUSED.values(), ids=REFUSED)
def test_a_refusal_comes_at_once(words):
    status, output, cpu_s = started(*words)
    assert status in (1, 2) and "found: " in output and "remedy: " in output and cpu_s < LIMIT_S, (status, cpu_s, output[-500:])


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
