"""The published description against the server: schemathesis makes requests of it, and every answer must be as described."""

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.serving.conftest import CHAT_TEMPLATE, serving
from tests.tools.text_model import save_text_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    folder = save_text_model(tmp_path_factory.mktemp("described") / "model")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    with serving(folder, max_waiting=500, api_key="secret", max_length=64) as served:
        yield served
        served.until_idle()


def test_every_answer_is_as_described(described, tmp_path):
    """Requests that fit the description are served, others are refused, and every answer is one of those described."""
    command = [Path(sys.executable).with_name("schemathesis"), "run", f"{described.url}/openapi.json", "--no-color"]
    command += ["--phases", "coverage,fuzzing", "--max-examples", "25", "--seed", "1", "--suppress-health-check", "all"]
    command += ["--exclude-checks", "positive_data_acceptance", "--header", "Authorization: Bearer secret"]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.serving.schemathesis_checks", "PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout + found.stderr
    assert int(re.search(r"(\d+) generated, \d+ passed", found.stdout)[1]) > 300, found.stdout
    lines = httpx.get(f"{described.url}/metrics").text.splitlines()
    answers = dict(line.rsplit(" ", 1) for line in lines if line.startswith("dmtd_answers_total"))
    for route in ("/v1/completions", "/v1/chat/completions"):
        for status in (200, 400):
            assert float(answers[f'dmtd_answers_total{{path="{route}",status="{status}"}}']) > 10, answers


def test_the_description_names_what_the_server_has(described):
    found = httpx.get(f"{described.url}/openapi.json").json()
    assert set(found["paths"]) == {
        "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{name}", "/health", "/metrics"
    }  # fmt: skip
    responses = found["paths"]["/v1/completions"]["post"]["responses"]
    assert set(responses) == {"200", "400", "401", "404", "408", "413", "415", "429", "500", "503"}
    assert list(found["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
    assert "content" not in found["paths"]["/health"]["get"]["responses"]["200"]
    properties = found["components"]["schemas"]["CompletionRequest"]["properties"]
    assert properties["stop_token_ids"]["anyOf"][0]["items"]["maximum"] == 257 and properties["n"]["anyOf"][0]["maximum"] == 504
    assert "HTTPValidationError" not in found["components"]["schemas"]


def test_the_pages_of_the_description_are_there(described):
    for page in ("/docs", "/redoc"):
        assert httpx.get(f"{described.url}{page}").status_code == 200
