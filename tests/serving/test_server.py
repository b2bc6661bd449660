"""The end of a server. That of the whole process, by signals, is tested in tests/tools/test_serve.py."""

import contextlib
import json
import logging
import time

import httpx
import pytest

from tests.serving.conftest import serving

LONG = {"prompt": "ab", "max_tokens": 500, "stream": True, "ignore_eos": True, "temperature": 0}


def slow_down(served, seconds: float) -> None:
    step = served.worker.engine.step
    served.worker.engine.step = lambda: (time.sleep(seconds), step())[1]


@pytest.mark.parametrize("num_streams", [0, 5])
def test_what_outlasts_the_grace_ends_with_an_error_and_is_counted_in_one_line(folder, caplog, num_streams):
    with caplog.at_level(logging.INFO), serving(folder, grace_s=0.2) as served, contextlib.ExitStack() as opened:
        slow_down(served, 0.02)
        client = opened.enter_context(httpx.Client(timeout=60))
        streams = [
            opened.enter_context(client.stream("POST", f"{served.url}/v1/completions", json=LONG)) for _ in range(num_streams)
        ]
        served.server.should_exit = True
        for stream in streams:
            last = [line for line in stream.iter_lines() if line][-1]
            assert "the server is shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    expected = ["5 requests outlast the grace period of 0.2 s and end with an error"] if num_streams else []
    assert warnings == expected


def test_what_ends_within_the_grace_ends_as_ever(folder, caplog):
    with serving(folder) as served, httpx.stream("POST", f"{served.url}/v1/completions", json=LONG, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        served.server.should_exit = True
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert caplog.records == []
