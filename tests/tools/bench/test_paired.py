"""The comparison of two trees' speeds: who runs in which order, what is a ratio, and what is refused."""

import json

import pytest

from tools.bench import paired

#: Writes, run by run, the next of the speeds in speeds.json, and who ran to a file of both trees.
BENCHMARK = """
import json, os, pathlib, sys
tree = pathlib.Path.cwd()
assert os.environ["PYTHONPATH"] == str(tree) and sys.argv[1:3] == ["--batches", "1"]
speeds = json.loads((tree / "speeds.json").read_text())
(tree / "speeds.json").write_text(json.dumps(speeds[1:]))
with open(tree.parent / "order.txt", "a") as file:
    print(tree.name, file=file)
rows = [{"form": "a", "batch": 1, "tokens_per_s": speeds[0], "seconds": 1 / speeds[0]}]
rows.append({"form": "b", "batch": 1, "tokens_per_s": 7.0, "seconds": 1.0})
pathlib.Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps({"rows": rows}))
"""


@pytest.fixture
def trees(tmp_path):
    def make(old: list[float], new: list[float]) -> list[str]:
        for name, speeds in (("old", old), ("new", new)):
            folder = tmp_path / name / "tools" / "bench"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "fake.py").write_text(BENCHMARK)
            (tmp_path / name / "speeds.json").write_text(json.dumps(speeds))
        return ["--old", str(tmp_path / "old"), "--new", str(tmp_path / "new"), "--pairs", str(len(old))]

    return make


RUN = ["--", "fake.py", "--batches", "1"]


def test_trees_take_turns_and_the_median_of_the_pairs_ratios_decides(trees, tmp_path, capsys):
    output = tmp_path / "ratios.json"
    # Ratios 0.5, 0.99 and 2: the medians of the two trees alone would give 100 / 99.
    options = [*trees([100.0, 100.0, 50.0], [50.0, 99.0, 100.0]), "--json", str(output)]
    assert paired.main([*options, *RUN]) == 0
    assert (tmp_path / "order.txt").read_text().split() == ["old", "new", "new", "old", "old", "new"]
    first, second = json.loads(output.read_text())["rows"]
    assert first == {"label": "rows, form a, batch 1", "old": 100, "new": 99, "ratios": [0.5, 0.99, 2.0], "ratio": 0.99}
    assert (second["label"], second["ratios"]) == ("rows, form b, batch 1", [1.0] * 3)
    assert "0.990  0.500 to 2.000\n" in capsys.readouterr().out


def test_a_row_below_the_least_ratio_is_named_and_changes_the_exit_status(trees, capsys):
    assert paired.main([*trees([100.0], [97.0]), *RUN]) == 1
    slow, same = capsys.readouterr().out.splitlines()[1:]
    assert "form a" in slow and slow.endswith("0.970 to 0.970  below 0.98")
    assert "form b" in same and "below" not in same
    assert paired.main([*trees([100.0], [97.0]), "--least", "0.95", *RUN]) == 0


def test_what_cannot_be_compared_is_refused(trees, tmp_path, capsys):
    options = trees([1.0], [1.0])
    for arguments, message in (
        ([*options, "--", "absent.py"], f"no {tmp_path / 'old' / 'tools' / 'bench' / 'absent.py'}"),
        (options, "1 pairs of nothing"),
        ([*options[:-1], "0", *RUN], "0 pairs of fake.py"),
        ([*options, "--", "fake.py", "--other"], "AssertionError"),
        ([*options, "--figure", "watts", *RUN], "0 figures watts"),
    ):
        assert paired.main(arguments) == 2
        assert message in capsys.readouterr().err


def test_rows_that_one_tree_lacks_are_named(trees, tmp_path, capsys):
    options = trees([1.0], [1.0])
    (tmp_path / "new" / "tools" / "bench" / "fake.py").write_text(BENCHMARK.replace('"form": "b"', '"form": "c"'))
    assert paired.main([*options, *RUN]) == 2
    assert "rows that not every run has: rows, form b, batch 1; rows, form c, batch 1" in capsys.readouterr().err


def test_figures_are_found_wherever_a_benchmark_writes_them():
    written = {
        "threads": 2,
        "cells": [{"batch": 1, "kind": "vanilla", "tokens_per_s": 2.5, "ratio": None, "is_tied": True}, {"tokens_per_s": None}],
        "alignment": {"kind": "x", "tokens_per_s": 3},
    }
    assert list(paired.figures(written, "tokens_per_s")) == [
        ("cells, batch 1, kind vanilla", 2.5),
        ("alignment, kind x", 3.0),
    ]
