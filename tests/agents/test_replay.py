"""Replays: what is computed under each policy, and output that survives interruptions."""

import dataclasses
import itertools
import json
import math

import pytest

from megatron_dmtd.agents.clients import EngineClient, counted_by
from megatron_dmtd.agents.cost import Prices, cost
from megatron_dmtd.agents.policies import RollingDrop, TextEngineering, standard
from megatron_dmtd.agents.replay import Replay, read_turns, run_replay
from megatron_dmtd.agents.trajectories import read_trajectories, write_trajectories
from megatron_dmtd.errors import ConfigError, DataError, DMTDError
from megatron_dmtd.inference import Engine, EngineConfig
from megatron_dmtd.inference.cache_ops.usage import Usage
from tests.agents.histories import history

POLICIES = [standard(), TextEngineering(threshold=900), RollingDrop(keep=4, reposition_tokens=1200)]


@pytest.fixture(scope="module")
def trajectories(record, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "runs.jsonl"
    write_trajectories(path, [{**record, "id": name} for name in ("one", "two", "three")])
    return read_trajectories(path)


@pytest.fixture(scope="module")
def make_client(model_folder):
    engine = Engine(model_folder, EngineConfig(max_batch=1, max_length=64), device="cpu")

    def make(**config):
        """A client with an empty cache."""
        own = Engine(engine.model, EngineConfig(max_batch=1, **{"cache_tokens": 16_384, "max_length": 8192, **config}))
        own.tokenizer = engine.tokenizer
        return EngineClient(own)

    make.tokenizer = engine.tokenizer
    return make


def replay_of(trajectories, make_client, policies=POLICIES, **changes):
    marks = itertools.count()
    fields = {"count": counted_by(make_client.tokenizer), "prices": Prices(), "mark": lambda: f"[{next(marks):06}]", **changes}
    return Replay(trajectories=trajectories, policies=policies, **fields)


def by_policy(turns):
    return {policy.name: [turn for turn in turns if turn.policy == policy.name] for policy in POLICIES}


@pytest.fixture(scope="module")
def played(trajectories, make_client, tmp_path_factory):
    output = tmp_path_factory.mktemp("replay")
    replay = replay_of(trajectories[:1], make_client)
    return output, run_replay(replay, make_client(), output, settings={})


def test_every_request_of_the_trajectory_is_made_under_every_policy(played, trajectories):
    _, turns = played
    for own in by_policy(turns).values():
        assert [turn.turn for turn in own] == list(range(len(trajectories[0].turns)))


def test_dropping_computes_the_new_tokens_alone(played):
    _, turns = played
    own = by_policy(turns)["rolling_drop"]
    assert all(turn.prefill_tokens == turn.new_tokens for turn in own) and sum(turn.repos_tokens for turn in own) > 0
    # What this request's own drops hide was still read by the message that triggers them.
    dropped = own[-1].prompt_tokens - own[-1].active_tokens
    assert dropped >= own[-1].drop_skipped_tokens > 0.2 * own[-1].prompt_tokens


def test_a_text_that_is_shortened_is_computed_again(played):
    _, turns = played
    found = by_policy(turns)
    assert sum(turn.prefill_tokens for turn in found["text_engineering"]) > sum(
        turn.prompt_tokens for turn in found["standard"][-1:]
    )
    assert max(turn.prompt_tokens for turn in found["text_engineering"]) < found["standard"][-1].prompt_tokens


def test_the_text_is_the_same_with_drops_and_without(played):
    _, turns = played
    found = by_policy(turns)
    assert [turn.prompt_tokens for turn in found["standard"]] == [turn.prompt_tokens for turn in found["rolling_drop"]]


def test_costs_are_those_of_the_counts(played):
    _, turns = played
    for turn in turns:
        counts = {field.name: getattr(turn, field.name) for field in dataclasses.fields(Usage)}
        assert math.isclose(turn.cost, cost(Usage(**counts), turn.output_tokens))
    assert turns[-1].output_tokens > 0, "the recorded answer is billed"


def test_active_tokens_can_be_estimated_where_nobody_says_them(played, trajectories, make_client, tmp_path):
    class Silent(EngineClient):
        def answer(self, body):
            return dataclasses.replace(super().answer(body), active_tokens=None)

    _, exact = played
    estimated = run_replay(replay_of(trajectories[:1], make_client), Silent(make_client().engine), tmp_path, settings={})
    assert not any(turn.active_is_exact for turn in estimated) and all(turn.active_is_exact for turn in exact)
    for one, other in zip(estimated, exact, strict=True):
        assert math.isclose(one.active_tokens, other.active_tokens, rel_tol=0.1)


def counts(turns):
    """What does not depend on the time."""
    return [dataclasses.replace(turn, first_token_s=0.0) for turn in turns]


def test_turns_are_written_as_they_come_and_read_again(played):
    output, turns = played
    assert read_turns(output / "turns.jsonl") == turns


def test_an_interrupted_replay_goes_on_with_the_run_that_was_cut(played, trajectories, make_client, tmp_path):
    replay = replay_of(trajectories[:1], make_client)
    num_turns = len(trajectories[0].turns)
    done = []

    def interrupt(count):
        done.append(count)
        if sum(done) == num_turns + 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_replay(replay, make_client(), tmp_path, settings={"a": 1}, on_turn=interrupt)
    path = tmp_path / "turns.jsonl"
    path.write_bytes(path.read_bytes()[:-10])  # as a killed writer leaves it
    assert len(read_turns(path)) == num_turns + 4
    again: list[int] = []
    turns = run_replay(replay, make_client(), tmp_path, settings={"a": 1}, on_turn=again.append)
    assert again == [num_turns] + [1] * 2 * num_turns, "what was whole is kept"
    assert counts(turns) == counts(played[1]) and read_turns(path) == turns
    kept: list[int] = []
    assert run_replay(replay, make_client(), tmp_path, settings={"a": 1}, on_turn=kept.append) == turns and kept == [
        3 * num_turns
    ]


def test_a_folder_of_other_settings_is_refused(played, trajectories, make_client):
    output, turns = played
    with pytest.raises(ConfigError, match="a replay with another keep: None"):
        run_replay(replay_of(trajectories[:1], make_client), make_client(), output, settings={"keep": 3})
    assert read_turns(output / "turns.jsonl") == turns


def test_damaged_turns_are_refused_by_line(tmp_path):
    path = tmp_path / "turns.jsonl"
    path.write_text(json.dumps({"policy": "standard"}) + "\n")
    with pytest.raises(DataError, match=r"turns\.jsonl, line 1"):
        read_turns(path)


def test_agents_take_turns_and_share_no_cached_text(trajectories, make_client, tmp_path):
    replay = replay_of(trajectories[:3], make_client, [RollingDrop(keep=4)], interleave=2)
    turns = run_replay(replay, make_client(), tmp_path, settings={})
    num_turns = len(trajectories[0].turns)
    assert [turn.trajectory for turn in turns] == ["one", "two"] * num_turns + ["three"] * num_turns
    # The template's first tokens stand before the mark.
    assert all(0 <= turn.new_tokens - turn.prefill_tokens <= (0 if turn.turn else 12) for turn in turns)
    assert replay.num_turns == len(turns) == 3 * num_turns


def test_under_pressure_evicting_what_was_dropped_first_computes_fewer_tokens(make_client, tmp_path):
    """Two agents that take turns, in a cache of half of what they have read: both compute more than the new tokens alone."""
    write_trajectories(tmp_path / "runs.jsonl", [{"id": name, "messages": history([1] * 16, size=120)} for name in "ab"])
    trajectories, found = read_trajectories(tmp_path / "runs.jsonl"), {}
    for is_aware in (True, False):
        client = make_client(cache_tokens=2400, page_size=4, max_length=None, drop_aware_eviction=is_aware)
        replay = replay_of(trajectories, make_client, [RollingDrop(keep=2, reposition_tokens=1000)], interleave=2)
        turns = run_replay(replay, client, tmp_path / str(is_aware), settings={})
        client.engine.check_integrity()
        found[is_aware] = sum(turn.prefill_tokens for turn in turns)
    new = sum(turn.new_tokens for turn in turns)
    assert new > 2 * 2400 and new < found[True] < 0.8 * found[False]


def test_a_fault_names_trajectory_policy_and_turn(trajectories, make_client, tmp_path):
    client = make_client(cache_tokens=512, max_length=512)
    with pytest.raises(DMTDError, match=r"trajectory 'one', policy standard, turn \d+ \(\d+ messages\): "):
        run_replay(replay_of(trajectories[:1], make_client), client, tmp_path, settings={})


def test_impossible_replays_are_refused(trajectories, make_client):
    with pytest.raises(ConfigError, match="interleave=0"):
        replay_of(trajectories, make_client, interleave=0)
    for policies in ([], [standard(), standard(5)]):
        with pytest.raises(ConfigError, match="policies"):
            replay_of(trajectories, make_client, policies)
