"""The example trajectory: real text, real answers, a function of its arguments."""

import json
from pathlib import Path

import pytest

import megatron_dmtd
from megatron_dmtd.agents.example import TOOLS, example_trajectory
from megatron_dmtd.agents.trajectories import read_trajectories, write_trajectories
from megatron_dmtd.errors import ConfigError

OURS = Path(megatron_dmtd.__file__).parent / "agents"


def answers(record):
    return [message for message in record["messages"] if message["role"] == "tool"]


@pytest.fixture(scope="module")
def record():
    return example_trajectory(responses=60, lines=30, seed=1)


def test_the_standard_library_gives_sixty_answers_of_thousands_of_tokens_that_differ(record):
    texts = [message["content"] for message in answers(record)]
    assert len(texts) == 60 and len(set(texts)) > 55
    assert sum(map(len, texts)) > 20_000, "characters: some 5,000 tokens at least"
    assert record["tools"] == TOOLS


def test_it_can_be_replayed_and_calls_tools_in_parallel_at_times(record, tmp_path):
    write_trajectories(tmp_path / "x.jsonl", [record])
    (one,) = read_trajectories(tmp_path / "x.jsonl")
    assert one.messages == record["messages"] and 40 < len(one.turns) < 61
    calls = [len(message["tool_calls"]) for message in one.messages if "tool_calls" in message]
    assert set(calls) == {1, 2} and sum(calls) == 60


def test_what_is_read_stands_in_the_files():
    record = example_trajectory(responses=12, lines=8, folder=OURS)
    calls = {call["id"]: call["function"] for message in record["messages"] for call in message.get("tool_calls", ())}
    num_read = 0
    for message in answers(record):
        function = calls[message["tool_call_id"]]
        arguments = json.loads(function["arguments"])
        if function["name"] == "read_file":
            lines = (OURS / arguments["path"]).read_text().splitlines()[arguments["first"] - 1 : arguments["last"]]
            assert [line[6:] for line in message["content"].split("\n")] == [line[:160] for line in lines]
            num_read += 1
        elif function["name"] == "grep" and message["content"] != "no lines":
            assert all(arguments["word"] in line for line in message["content"].split("\n") if not line.startswith("..."))
    assert num_read >= 4


def test_the_same_arguments_give_the_same_record_and_another_seed_another():
    first, again, other = (example_trajectory(responses=5, folder=OURS, seed=seed) for seed in (0, 0, 1))
    assert first == again and first["messages"] != other["messages"]


def test_it_ends_with_exactly_as_many_answers_as_asked_for():
    assert [len(answers(example_trajectory(responses=n, folder=OURS, seed=n))) for n in range(3, 23)] == list(range(3, 23))


def test_what_gives_no_trajectory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="responses=2"):
        example_trajectory(responses=2)
    with pytest.raises(ConfigError, match="lines=3"):
        example_trajectory(lines=3)
    with pytest.raises(ConfigError, match="no Python files in"):
        example_trajectory(folder=tmp_path)
