"""The command: what it says, what it refuses before it loads anything, and how it ends. Answers are tested in tests/serving."""

import concurrent.futures
import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from megatron_dmtd.errors import ConfigError
from tests.serving.conftest import CHAT_TEMPLATE
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


#: a server whose engine needs 30 ms for a step
SLOWED = """
import sys, time
from megatron_dmtd.inference import Engine
step = Engine.step
Engine.step = lambda engine: (time.sleep(0.03), step(engine))[1]
from tools.serve import main
sys.exit(main(sys.argv[1:]))
"""


def metric(url: str, name: str) -> str:
    lines = httpx.get(url.removesuffix("/v1") + "/metrics").text.splitlines()
    return next(line.split()[-1] for line in lines if line.startswith(f"{name} "))


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


@pytest.mark.parametrize("grace", ["0", "1"])
def test_when_the_grace_is_over_every_request_gets_its_error_and_the_log_one_line(folder, grace):
    """Streams that run, one that waits, one that is not streamed, a client that reads nothing, and one that has not sent all."""
    process, url = started(["-c", SLOWED], folder, "--grace", grace)
    host, port = httpx.URL(url).host, httpx.URL(url).port
    with contextlib.ExitStack() as opened:
        client = opened.enter_context(httpx.Client(timeout=60, limits=httpx.Limits(max_connections=None)))
        streams = [opened.enter_context(client.stream("POST", f"{url}/completions", json=LONG)) for _ in range(40)]
        running = [lines for lines in map(httpx.Response.iter_lines, streams[:8]) if next(lines).startswith("data: ")]
        whole = opened.enter_context(concurrent.futures.ThreadPoolExecutor(1))
        asked = whole.submit(client.post, f"{url}/completions", json={**LONG, "stream": False})
        half = opened.enter_context(socket.create_connection((host, port)))
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{")
        while float(metric(url, "dmtd_waiting")) < 33:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        rest = [[line for line in lines if line] for lines in (*running, *map(httpx.Response.iter_lines, streams[8:]))]
        for lines in rest:
            assert "shutting down" in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
        assert asked.result().status_code == 503 and "shutting down" in asked.result().json()["error"]["message"]
        out, errors = process.communicate(timeout=60)
    assert len(rest) == 40 and out == "" and process.returncode == 0
    assert errors.splitlines() == [f"42 requests outlast the grace period of {grace} s and end with an error"]


def worst_health(url: str, *, seconds: float) -> tuple[float, dict[str, list[int]]]:
    """The slowest answer of `/health` under a storm of hostile requests, in seconds, and the statuses that those got.

    The machine has other work: how much later than asked a sleeper here was woken is not the server's time, and is taken off.
    """
    command = [sys.executable, "-m", "tests.serving.hostile", url, str(seconds), "3"]
    storm = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    slowest = late = 0.0
    with httpx.Client(timeout=60) as client:
        while storm.poll() is None:
            start = time.perf_counter()
            assert client.get(f"{url}/health").status_code == 200
            end = time.perf_counter()
            slowest = max(slowest, end - start)
            time.sleep(0.01)
            late = max(late, time.perf_counter() - end - 0.01)
    return slowest - late, json.loads(storm.stdout.read())


def test_health_answers_within_a_fifth_of_a_second_under_a_storm_of_hostile_requests(folder, tmp_path):
    """Every kind of them gets a status that it should get. The best of a few storms counts, on a machine with other work."""
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    process, url = started(["tools/serve.py"], model)
    slowest, statuses = [], {}
    while min(slowest, default=1.0) >= 0.2 and len(slowest) < 5:
        worst, found = worst_health(url.removesuffix("/v1"), seconds=5)
        slowest.append(worst)
        statuses = {name: {*statuses.get(name, ()), *own} for name, own in found.items()}
    served = {"bias", "likely tokens", "a hundred outputs"}
    for name, own in statuses.items():
        allowed = {200, 429} if name in served else {413} if name == "too large" else {400, 429}
        assert own and own <= allowed, (name, own)
    assert min(slowest) < 0.2, slowest
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[1] == "" and process.returncode == 0


def test_a_second_ctrl_c_ends_at_once_and_quietly(folder):
    process, url = started(["-c", SLOWED], folder, "--grace", "600")
    with httpx.Client(timeout=60) as client, client.stream("POST", f"{url}/completions", json=LONG) as stream:
        next(stream.iter_lines())
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == ("", "") and process.returncode in (0, -signal.SIGINT)


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
        (["--max-waiting", "-1"], "--max-waiting -1"),
        (["--grace", "-1"], "--grace -1"),
        (["--cache-gib", "nan"], "--cache-gib nan"),
        (["--max-body-mib", "0"], "--max-body-mib 0.0"),
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


def test_defaults_that_no_request_could_have_are_refused_with_their_file(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 1.5}))
    with pytest.raises(ConfigError, match=r"generation_config.json: top_p=1.5\nrequired: above 0, at most 1"):
        sampling_defaults(tmp_path)
