"""Reports of replays: sums, ratios, files."""

import json
import math

import pytest

from megatron_dmtd.agents.replay import Turn
from megatron_dmtd.agents.report import summarise, table, write_report


def turn(policy, trajectory, number, **changes):
    fields = {
        "prompt_tokens": 100 * (number + 1),
        "new_tokens": 100,
        "prefill_tokens": 100,
        "cached_tokens": 100 * number,
        "repos_tokens": 0,
        "drop_skipped_tokens": 0,
        "output_tokens": 5,
        "first_token_s": 0.1 * (number + 1),
        "active_tokens": 100 * (number + 1),
        "active_is_exact": True,
        "cost": 2.0,
    }
    return Turn(policy=policy, trajectory=trajectory, turn=number, **{**fields, **changes})


@pytest.fixture
def turns():
    plain = [turn("standard", name, number) for name in ("a", "b") for number in range(4)]
    dropping = [
        turn(
            "rolling_drop", "a", number, repos_tokens=7, drop_skipped_tokens=3, active_tokens=50, active_is_exact=False, cost=1.0
        )
        for number in range(4)
    ]
    return plain + dropping


def test_a_summary_adds_up_its_policys_turns(turns):
    standard, dropping = summarise(turns)
    assert (standard.policy, standard.num_turns, standard.prefill_tokens, standard.cached_tokens) == ("standard", 8, 800, 1200)
    assert (dropping.repos_tokens, dropping.drop_skipped_tokens, dropping.cost) == (28, 12, 4.0)
    assert math.isclose(standard.first_token_s, 0.25) and math.isclose(standard.last_first_token_s, 0.4)
    assert standard.most_active_tokens == standard.most_held_tokens == 400
    assert (dropping.most_active_tokens, dropping.active_is_exact, dropping.most_held_tokens) == (50, False, 407)


def test_the_table_has_a_line_per_policy_with_costs_relative_to_the_first(turns):
    lines = table(summarise(turns)).splitlines()
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    assert lines[2] == "| `standard` | 8 | 800 | 1,200 | 0 | 0 | 16 (1.00 x) | 250 | 400 | 400 | 400 |"
    assert "4 (0.25 x)" in lines[3] and "50 (estimated)" in lines[3]


def test_a_report_is_a_table_summaries_and_plots(turns, tmp_path):
    text = write_report(turns, tmp_path)
    assert text in (tmp_path / "report.md").read_text()
    assert [json.loads(line)["policy"] for line in (tmp_path / "summary.jsonl").open()] == ["standard", "rolling_drop"]
    assert (tmp_path / "replay.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["replay.png", "report.md", "summary.jsonl"]


def test_an_interrupted_plot_leaves_the_old_one(turns, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    write_report(turns, tmp_path)
    before = (tmp_path / "replay.png").read_bytes()
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_report(turns[:4], tmp_path)
    assert (tmp_path / "replay.png").read_bytes() == before and len(list(tmp_path.iterdir())) == 3
