"""The stories: the same everywhere, all different, and consistent with themselves, since that is what they are for."""

import json
import random
import re

import pytest

from megatron_dmtd.quickstart.stories import NAMES, NUMBERS, main, story, write_stories

ALL_NAMES = {name for names in NAMES.values() for name in names}


@pytest.fixture(scope="module")
def stories() -> list[str]:
    draw = random.Random(5)
    return [story(draw) for _ in range(500)]


def test_they_are_the_same_on_every_machine_and_no_two_are_equal(tmp_path):
    write_stories(tmp_path / "first.jsonl", count=300)
    assert main([str(tmp_path / "second.jsonl"), "--count", "300"]) == 0
    text = (tmp_path / "first.jsonl").read_text()
    assert text == (tmp_path / "second.jsonl").read_text()
    found = [json.loads(line)["text"] for line in text.splitlines()]
    assert len(set(found)) == 300
    assert found[0].startswith("Once upon a time there lived a hungry fox in a village. Everybody called him Tom.")


def test_a_story_has_two_figures_whose_pronouns_stay(stories):
    for text in stories:
        names = ALL_NAMES & set(re.findall(r"\w+", text))
        assert len(names) == 2, text
        pronouns = {pronoun for pronoun, known in NAMES.items() for name in names if name in known}
        found = set(re.findall(r"\b(?:he|she)\b", text.lower()))
        assert found <= pronouns, text


def test_what_is_given_is_missing_afterwards(stories):
    counted = 0
    for text in stories:
        for had, gave, left in re.findall(r"had (\w+) \w+ in .*? gave \w+ (\w+) \w+\. Now \w+ had (\w+) ", text):
            counted += 1
            assert NUMBERS.index(had) - NUMBERS.index(gave) == NUMBERS.index(left)
    assert counted > 50


def test_what_was_lost_is_what_is_found(stories):
    lost = [re.findall(r"(?:lost my|look for the|found the) (\w+ \w+)\b", text) for text in stories if "I have lost" in text]
    assert len(lost) > 50 and all(len(things) == 3 and len(set(things)) == 1 for things in lost)


def test_articles_and_plurals_are_english(stories):
    text = " ".join(stories)
    assert not re.findall(r"\b[Aa] [aeiou]\w*|\b[Aa]n [^aeiou\W]\w*", text)
    assert "berrys" not in text and re.search(r"\w+ berries", text)
