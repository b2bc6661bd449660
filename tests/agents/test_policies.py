"""Policies: what they say at a turn, and that what they say later goes on from there."""

import copy
import itertools
import json

import pytest

from megatron_dmtd.agents.policies import RollingDrop, TextEngineering, ends_request, estimated, standard, summary_of, text_of
from megatron_dmtd.errors import ConfigError
from tests.agents.histories import history, letters, random_history


def requests_of(messages):
    """The histories of all requests."""
    return [messages[: number + 1] for number in range(len(messages)) if ends_request(messages, number)]


def restricted(cache, num_messages):
    """The operations up to a message, by those after it."""
    drop = {trigger: numbers for trigger, numbers in cache["drop"].items() if int(trigger) < num_messages}
    return {"drop": drop, "reposition": [number for number in cache["reposition"] if number < num_messages]}


def test_nothing_is_dropped_before_the_thirteenth_tool_response_arrives():
    messages = history([1] * 14)
    caches = [RollingDrop()(one, letters).cache for one in requests_of(messages)]
    assert [cache["drop"] for cache in caches[:13]] == [{}] * 13
    # the answers are messages 3, 5, 7, ...; the thirteenth is 27, the fourteenth 29
    assert caches[13]["drop"] == {"27": [3]} and caches[14]["drop"] == {"27": [3], "29": [5]}
    assert [cache["reposition"] for cache in caches] == [[]] * 15, "far below the threshold"


def test_each_response_of_parallel_calls_drops_one_at_its_own_boundary():
    messages = history([2, 2, 1])[:-1]
    assert RollingDrop(keep=2)(messages, letters).cache["drop"] == {"6": [3], "7": [4], "9": [6]}


def test_it_repositions_past_the_threshold_only_if_something_was_dropped_and_only_where_a_request_ends():
    messages = history([1, 2, 1, 1], size=100)[:-1]
    tight = RollingDrop(keep=2, reposition_tokens=100)(messages, letters).cache
    # message 6 is the second of two answers to parallel calls; message 3 passes the threshold, but nothing was dropped then
    assert tight == {"drop": {"6": [3], "8": [5], "10": [6]}, "reposition": [6, 8, 10]}
    assert RollingDrop(keep=9, reposition_tokens=100)(messages, letters).cache == {"drop": {}, "reposition": []}


def test_the_threshold_is_one_of_positions_which_dropping_alone_does_not_lower():
    messages = history([1] * 5, size=100)[:-1]
    sizes = [letters(message) for message in messages]
    # active tokens stay near 2 answers from here on, positions grow with every answer
    at = sum(sizes[:10]) + 4
    cache = RollingDrop(keep=2, reposition_tokens=at - 1)(messages, letters).cache
    assert cache["reposition"] == [9]
    assert RollingDrop(keep=2, reposition_tokens=at)(messages, letters).cache["reposition"] == [11]


@pytest.mark.parametrize("seed", range(40))
def test_the_operations_of_a_request_are_the_first_ones_of_every_later_request(seed):
    messages = random_history(seed)
    policy = RollingDrop(keep=2, reposition_tokens=60)
    last = policy(messages, letters)
    assert last.messages == messages
    for one in requests_of(messages):
        assert policy(one, letters).cache == restricted(last.cache, len(one))
    assert policy(copy.deepcopy(messages), letters) == last, "a function of the history"


def test_random_histories_drop_and_reposition():
    caches = [RollingDrop(keep=2, reposition_tokens=60)(random_history(seed), letters).cache for seed in range(40)]
    assert sum(bool(cache["drop"]) for cache in caches) > 20 and sum(len(cache["reposition"]) > 1 for cache in caches) > 10


@pytest.mark.parametrize("seed", range(20))
def test_what_is_dropped_is_every_tool_response_but_the_last_ones_once_and_never_of_the_future(seed):
    messages = random_history(seed)
    tools = [number for number, message in enumerate(messages) if message["role"] == "tool"]
    drop = RollingDrop(keep=3)(messages, letters).cache["drop"]
    dropped = [number for numbers in drop.values() for number in numbers]
    assert dropped == tools[:-3] and all(max(numbers) < int(trigger) for trigger, numbers in drop.items())


def test_a_policy_leaves_the_history_alone():
    messages = random_history(3)
    before = copy.deepcopy(messages)
    for policy in (RollingDrop(keep=1, reposition_tokens=1), TextEngineering(threshold=1), standard()):
        policy(messages, letters)
        assert messages == before


def test_standard_sends_the_text_in_an_ordinary_request():
    messages = random_history(1)
    request = standard()(messages, letters)
    assert request.messages == messages and request.cache is None and request.fields == {}
    assert RollingDrop()(messages, letters).fields == {"cache": {"drop": {}, "reposition": []}}


def test_a_text_past_the_threshold_is_the_task_with_a_summary_and_the_last_exchange():
    messages = history([1, 1, 2], size=100)[:-1]
    request = TextEngineering(threshold=300)(messages, letters)
    assert request.cache is None
    system, task, *rest = request.messages
    assert system == messages[0] and rest == messages[-3:], "the last exchange is kept whole"
    assert task["role"] == "user" and task["content"].startswith("go\n\nSummary of 4 earlier messages:\n")
    assert 'called look {"at": 0}' in task["content"] and "-> call_1 xxx" in task["content"]
    assert "(107 characters)" in task["content"]


@pytest.mark.parametrize("seed", range(20))
def test_a_text_is_that_of_the_last_request_with_what_is_new_unless_this_passes_the_threshold(seed):
    messages, threshold = random_history(seed), 900
    policy = TextEngineering(threshold=threshold)
    histories = requests_of(messages)
    text = policy(histories[0], letters).messages
    for before, after in itertools.pairwise(histories):
        longer = [*text, *after[len(before) :]]
        text = policy(after, letters).messages
        if sum(map(letters, longer)) + 4 <= threshold:
            assert text == longer
        else:
            last = max(number for number, message in enumerate(after) if message["role"] == "assistant")
            assert text[2:] == after[last:] and "Summary of" in text[1]["content"]


def test_random_texts_pass_the_threshold_and_stay_below_it():
    texts = [TextEngineering(threshold=900)(random_history(seed), letters).messages for seed in range(20)]
    num_shortened = sum("Summary of" in text[1]["content"] for text in texts)
    assert 5 < num_shortened < 20


def test_a_text_is_not_shortened_at_every_turn():
    messages = history([1] * 60, size=1000)[:-1]
    texts = [TextEngineering(threshold=12_000)(one, letters).messages for one in requests_of(messages)]
    changes = [number for number, (old, new) in enumerate(itertools.pairwise(texts)) if new[: len(old)] != old]
    assert max(sum(map(letters, text)) for text in texts) <= 12_000 and sum(map(letters, messages)) > 60_000
    assert 5 < len(changes) < 10


def test_without_a_task_of_the_user_or_with_one_in_parts_the_summary_is_a_message_of_its_own():
    messages = history([1, 1], size=100)[:-1]
    messages[1] = {"role": "user", "content": [{"type": "text", "text": "go"}]}

    def count(message):
        return len(text_of(message["content"]))

    _, task, summary, *rest = TextEngineering(threshold=150)(messages, count).messages
    assert task == messages[1] and summary["role"] == "user" and summary["content"].startswith("Summary of 2 ")
    assert rest == messages[-2:]


def test_standard_may_have_a_models_limit():
    messages = history([1, 1, 2], size=100)[:-1]
    limited = standard(300)
    assert (
        limited.name == "standard"
        and limited(messages, letters).messages == TextEngineering(threshold=300)(messages, letters).messages
    )


def test_summaries_have_a_limit():
    messages = history([1] * 200)[2:-1]
    lines = summary_of(messages).split("\n")
    assert lines[:2] == ["Summary of 400 earlier messages:", "(560 earlier lines are left out)"] and len(lines) == 42
    assert all(len(line) < 200 for line in lines)


def test_an_estimate_counts_contents_calls_and_something_for_headers():
    count = estimated(2.0, per_message=3)
    assert count({"role": "user", "content": "häh"}) == 3 + 2
    assert count({"role": "tool", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]}) == 5
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    assert count(called) == 3 + round(len(json.dumps(called["tool_calls"][0])) / 2)
    assert text_of({"a": 1}) == '{"a": 1}'


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: RollingDrop(keep=0), "keep=0"),
        (lambda: RollingDrop(reposition_tokens=True), "reposition_tokens=True"),
        (lambda: TextEngineering(threshold=0), "threshold=0"),
        (lambda: standard(-1), "threshold=-1"),
    ],
)
def test_impossible_settings_are_refused(make, found):
    with pytest.raises(ConfigError, match=f"found: {found}"):
        make()


def test_a_long_task_before_any_turn_of_the_assistant_is_left_alone():
    messages = history([])[:-1]
    assert TextEngineering(threshold=3)(messages, letters).messages == messages
