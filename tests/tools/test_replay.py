"""The command that replays recorded runs: from an example to a report, resumed, refused."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dmtd.agents.replay import read_turns
from megatron_dmtd.agents.trajectories import read_trajectories
from tests.serving.conftest import serving
from tools.replay import main

ROOT = Path(__file__).parents[2]
SOURCES = str(ROOT / "megatron_dmtd" / "agents")
THRESHOLDS = ["--keep", "3", "--reposition-tokens", "900", "--summary-tokens", "700"]


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Path:
    """A folder with runs.jsonl and a model."""
    folder = tmp_path_factory.mktemp("example")
    paths = ["--output", str(folder / "runs.jsonl"), "--model", str(folder / "model"), "--sources", SOURCES]
    shape = ["--responses", "8", "--lines", "5", "--hidden-size", "32", "--layers", "2", "--trajectories", "2"]
    assert main(["example", *paths, *shape]) == 0
    return folder


def test_an_example_is_replayed_in_process_under_all_policies_and_reported(example, tmp_path, capsys):
    command = ["run", str(example / "runs.jsonl"), "--model", str(example / "model"), "--output", str(tmp_path), *THRESHOLDS]
    assert main([*command, "--cache-tokens", "16384"]) == 0
    captured = capsys.readouterr()
    for policy in ("standard", "text_engineering", "rolling_drop"):
        assert f"| `{policy}` |" in captured.out
    assert "definitions of tools are not sent" in captured.err
    turns = read_turns(tmp_path / "turns.jsonl")
    trajectories = read_trajectories(example / "runs.jsonl")
    assert len(turns) == 3 * sum(len(trajectory.turns) for trajectory in trajectories)
    dropping = [turn for turn in turns if turn.policy == "rolling_drop"]
    assert sum(turn.prefill_tokens for turn in dropping) == sum(turn.new_tokens for turn in dropping)
    for name in ("report.md", "summary.jsonl", "replay.png", "settings.json"):
        (tmp_path / name).stat()
    # Again: nothing is played, and the report is written anew.
    (tmp_path / "replay.png").unlink()
    assert main(["report", str(tmp_path)]) == 0 and capsys.readouterr().out == captured.out
    assert (tmp_path / "replay.png").exists()
    assert main([*command, "--cache-tokens", "16384"]) == 0 and read_turns(tmp_path / "turns.jsonl") == turns
    assert main([*command, "--cache-tokens", "8192"]) == 2
    assert "a replay with another cache_tokens: 16384" in capsys.readouterr().err


def test_it_is_replayed_against_a_server_and_counts_are_those_of_the_process(example, tmp_path, capsys):
    runs, chosen = str(example / "runs.jsonl"), [*THRESHOLDS, "--policies", "rolling_drop", "--interleave", "2"]
    counting = ["--tokenizer", str(example / "model"), "--price-input", "3", "--price-cached", "0.3", "--price-output", "15"]
    with serving(example / "model", max_batch=1, cache_tokens=16_384, max_length=8192) as served:
        url = ["--base-url", f"{served.url}/v1", "--model-name", "tiny"]
        assert main(["run", runs, *url, *chosen, *counting, "--output", str(tmp_path / "http")]) == 0
    model = ["--model", str(example / "model"), "--cache-tokens", "16384"]
    assert main(["run", runs, *model, *chosen, *counting, "--output", str(tmp_path / "inside")]) == 0
    first, second = (read_turns(tmp_path / name / "turns.jsonl") for name in ("http", "inside"))
    # Marks differ, and with them some tokens at the beginning.
    assert [turn.prefill_tokens for turn in first if turn.turn > 1] == [turn.prefill_tokens for turn in second if turn.turn > 1]
    assert [turn.trajectory for turn in first[:4]] == [turn.trajectory for turn in second[:4]] and first[0].trajectory != first[
        1
    ].trajectory
    assert not first[0].active_is_exact and second[0].active_is_exact and first[0].cost > 0
    assert "(estimated)" in capsys.readouterr().out


def test_help_teaches(capsys):
    for command in ([], ["run"], ["example"], ["report"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--help"])
        assert ended.value.code == 0
    printed = capsys.readouterr().out
    for text in ("rolling_drop", "python tools/serve.py", "--price-cached", "--trajectories"):
        assert text in printed


def test_help_and_refusals_do_not_wait_for_torch(tmp_path):
    code = "import sys, tools.replay; assert tools.replay.main(sys.argv[1:]) == 2; assert 'torch' not in sys.modules"
    (tmp_path / "bad.jsonl").write_text("{}\n")
    arguments = ["run", str(tmp_path / "bad.jsonl"), "--base-url", "http://x/v1", "--output", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "line 1" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "RUNS", "--output", "OUT"], "neither --base-url nor --model"),
        (["run", "RUNS", "--output", "OUT", "--model", "MODEL", "--base-url", "http://x"], "both --base-url and --model"),
        (["run", "RUNS", "--output", "OUT", "--base-url", "localhost:8000"], "found: --base-url localhost:8000"),
        (["run", "RUNS", "--output", "OUT", "--base-url", "http://x", "--evict-by-use"], "--evict-by-use with --base-url"),
        (["run", "RUNS", "--output", "OUT", "--base-url", "http://127.0.0.1:9/v1"], "no answer from http://127.0.0.1:9/v1"),
        (["run", "RUNS", "--output", "OUT", "--base-url", "http://x", "--keep", "0"], "found: keep=0"),
        (["run", "RUNS", "--output", "OUT", "--base-url", "http://x", "--interleave", "0"], "found: interleave=0"),
        (["run", "RUNS", "--output", "OUT", "--base-url", "http://x", "--bytes-per-token", "0"], "--bytes-per-token 0.0"),
        (["run", "RUNS", "--output", "OUT", "--base-url", "http://x", "--price-input", "-1"], "a price of -1.0 (input)"),
        (["run", "RUNS", "--output", "OUT", "--base-url", "http://x", "--api-key-file", "none"], "--api-key-file none"),
        (["run", "RUNS", "--output", "OUT", "--model", "none"], "no directory none"),
        (["run", "RUNS", "--output", "OUT", "--model", "MODEL", "--cache-tokens", "0"], "cache_tokens=0"),
        (["run", "none.jsonl", "--output", "OUT", "--base-url", "http://x"], "none.jsonl: "),
        (["run", "RUNS", "--output", "RUNS", "--model", "MODEL"], "remedy: choose another --output"),
        (["report", "OUT"], "no turns in"),
        (["example", "--output", "no/such/x.jsonl", "--sources", SOURCES], "the example: No such file"),
        (["example", "--output", "OUT", "--responses", "1", "--sources", SOURCES], "responses=1"),
        (["example", "--output", "OUT", "--trajectories", "0"], "--trajectories 0"),
        (["example", "--output", "OUT", "--hidden-size", "40"], "--hidden-size 40"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_remedy(example, tmp_path, capsys, arguments, message):
    places = {"RUNS": example / "runs.jsonl", "MODEL": example / "model", "OUT": tmp_path / "out"}
    assert main([str(places.get(argument, argument)) for argument in arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed and re.search(r"^remedy: ", printed, re.MULTILINE)


def test_a_trajectory_that_cannot_be_used_is_refused_by_line_before_anything_is_written(example, tmp_path, capsys):
    runs = tmp_path / "runs.jsonl"
    runs.write_text((example / "runs.jsonl").read_text() + json.dumps([{"role": "assistant", "content": "x"}]) + "\n")
    assert main(["run", str(runs), "--model", str(example / "model"), "--output", str(tmp_path / "out")]) == 2
    assert "runs.jsonl, line 3: messages[0] has the role 'assistant'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
