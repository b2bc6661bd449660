"""The pictures of the documentation: current, and true to an independent count."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron_dmtd.agents.pictures import (
    EVICTED,
    NUM_TOKENS,
    PICTURES,
    PROGRAM,
    agent_count,
    agent_history,
    lengths_over_time,
    seen_positions,
    write_pictures,
)
from megatron_dmtd.agents.policies import RollingDrop
from megatron_dmtd.inference.cache_ops.program import Timeline, parse_program

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cache_operations.md").read_text()


def texts_of(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]


@pytest.mark.parametrize("name", PICTURES)
def test_the_documents_pictures_are_what_the_code_draws_and_the_page_shows_them(name):
    assert (ROOT / "docs" / "images" / name).read_text() == PICTURES[name](), "run: python tools/replay.py pictures docs/images"
    assert f"](images/{name})" in PAGE


def test_the_grid_is_the_worked_example_of_the_page():
    timeline = Timeline(parse_program(PROGRAM, NUM_TOKENS), 1, NUM_TOKENS + 1)
    assert seen_positions(timeline, 3) == {0: 0, 1: 1, 2: 2, 3: 3}
    assert seen_positions(timeline, 6) == {1: 0, 2: 1, 3: 2, 4: 3, 5: 4, 6: 5}
    assert seen_positions(timeline, 7) == {1: 0, 3: 1, 4: 2, 5: 3, 6: 4, 7: 5}
    cells = [text for text in texts_of(PICTURES["cache_segments.svg"]()) if text.isdigit()]
    # the heads of the columns, then what each query sees
    assert len(cells) == NUM_TOKENS + (1 + 2 + 3 + 4) + (4 + 5 + 6) + 6


def test_the_recovery_computes_what_it_says():
    texts = texts_of(PICTURES["cache_recovery.svg"]())
    # token 7 reads 5 and 6, and nothing that is computed reads 0, which has been dropped
    assert [text for text in texts if text.startswith("token ")] == ["token 5", "token 6", "token 7"]
    assert "Tokens 0, 5, 6 were evicted; these rows are computed, in one pass" in texts and EVICTED == (0, 5, 6)
    assert "missing and not needed: 0" in texts


def test_the_tree_parts_where_the_operations_do():
    texts = texts_of(PICTURES["cache_tree.svg"]())
    tokens = [text for text in texts if text.startswith("token ")]
    assert tokens == [f"token {number}" for number in range(8)] + [f"token {number}" for number in range(4, 8)]
    assert texts.count("drop 0") == 2 and texts.count("reposition") == 2 and "drop 2" in texts and "drop 3" in texts


def test_lengths_are_counted_from_the_operations():
    messages, policy = agent_history(20), RollingDrop(keep=5, reposition_tokens=6000)
    found = lengths_over_time(messages, policy)
    sizes = [agent_count(message) for message in messages]
    assert [text for text, _, _ in found] == [sum(sizes[: number + 1]) for number in range(1, len(messages), 2)]
    tools = [number for number, message in enumerate(messages) if message["role"] == "tool"]
    assert found[-1][1] == sum(sizes) - sum(sizes[number] for number in tools[:-5])
    assert max(position for _, _, position in found) < 6000 + max(sizes) + 60 and all(
        active <= position for _, active, position in found
    )


def test_they_are_written_to_a_folder(tmp_path):
    assert [path.name for path in write_pictures(tmp_path)] == sorted(PICTURES, key=list(PICTURES).index)
    assert all((tmp_path / name).read_text().startswith("<svg") for name in PICTURES)
