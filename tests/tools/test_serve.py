"""The command: what it says, what it refuses before it loads anything, and how it ends. Answers are tested in tests/serving."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.tools.text_model import save_text_model
from tools.serve import main, sampling_defaults

ROOT = Path(__file__).parents[2]
#: a server whose engine fails at its tenth step
FAULTY = """
import sys
from megatron_dmtd.inference import Engine
step, count = Engine.step, 0
def faulty(engine):
    global count
    count += 1
    if count == 10:
        raise ZeroDivisionError("at the tenth step")
    return step(engine)
Engine.step = faulty
from tools.serve import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_text_model(tmp_path_factory.mktemp("served") / "model")


def started(program: list[str], folder: Path, *options: str) -> tuple[subprocess.Popen, str]:
    """A server that listens, and its address."""
    command = [sys.executable, "-W", "ignore", *program, str(folder), "--port", "0", "--device", "cpu", *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert "serving model (bidirectional-refresh) at http://127.0.0.1:" in line, line + process.stderr.read()
    facts = process.stdout.readline()
    assert "8 sequences at once, 512 tokens each at most, on cpu" in facts and "temperature 1.0" in facts
    return process, line.split()[-1]


LONG = {"prompt": "ab", "max_tokens": 400, "stream": True, "ignore_eos": True, "temperature": 0}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_end(folder, number):
    process, url = started(["tools/serve.py"], folder)
    with httpx.stream("POST", f"{url}/completions", json=LONG, timeout=60) as stream:
        lines = stream.iter_lines()
        first = next(lines)
        process.send_signal(number)
        rest = [line for line in lines if line]
    assert first.startswith("data: ") and rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert process.communicate(timeout=60) == ("", "") and process.returncode == 0


def test_requests_that_take_longer_than_the_grace_are_cut_off(folder):
    process, url = started(["tools/serve.py"], folder, "--grace", "0")
    with httpx.stream("POST", f"{url}/completions", json=LONG, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_after_a_fault_of_the_engine_the_server_ends_with_status_1(folder):
    process, url = started(["-c", FAULTY], folder)
    with httpx.stream("POST", f"{url}/completions", json=LONG, timeout=60) as stream:
        last = [line for line in stream.iter_lines() if line][-1]
    assert "ZeroDivisionError: at the tenth step" in json.loads(last.removeprefix("data: "))["error"]["message"]
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "ZeroDivisionError: at the tenth step" in errors


def test_what_is_wrong_is_refused_before_anything_is_loaded(tmp_path, capsys):
    absent = str(tmp_path / "no model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main([absent, "--port", str(taken.getsockname()[1])]) == 2
        assert "in use" in capsys.readouterr().err
    for arguments, found in (
        (["--port", "70000"], "--port 70000"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["--api-key-file", str(tmp_path / "absent")], "absent"),
        (["--port", "0"], "no model"),
    ):
        assert main([absent, *arguments]) == 2
        error = capsys.readouterr().err
        assert found in error and "remedy: " in error


@pytest.mark.parametrize("text", ["", "two words", "kéy"])
def test_a_key_is_one_word_of_ascii(tmp_path, capsys, text):
    (tmp_path / "key").write_text(text)
    assert main([str(tmp_path), "--api-key-file", str(tmp_path / "key")]) == 2
    assert "one word of ASCII" in capsys.readouterr().err


def test_a_model_without_a_tokenizer_is_refused(folder, tmp_path, capsys):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert main([str(tmp_path), "--port", "0", "--device", "cpu"]) == 2
    assert "no tokenizer in" in capsys.readouterr().err


def test_a_model_says_how_it_is_to_be_decoded(tmp_path):
    assert sampling_defaults(tmp_path) == {"temperature": 1.0}
    for fields, expected in (
        ({"temperature": 0.6, "top_k": 20, "eos_token_id": 1}, {"temperature": 0.6, "top_k": 20}),
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}, {"temperature": 1.0, "repetition_penalty": 1.1}),
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps(fields))
        assert sampling_defaults(tmp_path) == expected
