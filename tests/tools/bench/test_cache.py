"""The benchmark runs on a small model, and its programs are what it says."""

import importlib.util
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from megatron_dmtd.inference.cache_ops.passes import PassViews

PATH = Path(__file__).parents[3] / "tools" / "bench" / "cache.py"


@pytest.fixture
def bench(monkeypatch):
    spec = importlib.util.spec_from_file_location("bench_cache", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "MODEL", module.TINY)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


def test_every_case_is_timed(bench, tmp_path, capsys):
    out, copied = tmp_path / "figures.json", PassViews.copy_moved
    assert bench.main(["--tokens", "512", "--rounds", "1", "--turns", "18", "--cpu-time", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert [row["case"] for row in figures] == ["decode", *["reposition"] * 3, "recovery", *["eviction"] * 2]
    assert all(row["ratio"] > 0 for row in figures)
    assert PassViews.copy_moved is copied
    assert figures[0]["what"] == "tokens/s with 312 of 512 tokens active, and of 312 fresh ones"
    enough, scarce = figures[-2:]
    # With all the cache that they need, two agents compute their new tokens.
    assert enough["value"] == enough["against"] == 2 * (40 + 18 * 128)
    assert enough["value"] <= scarce["value"] < scarce["against"]
    assert "drop-aware" in capsys.readouterr().out


def test_requests_of_an_agent_grow_and_drop_the_oldest_answers(bench):
    requests = list(bench.trajectory(6, seed=1))
    assert [new for _, _, new in requests] == [168, *[128] * 5]
    assert all(later[: len(tokens)] == tokens for (tokens, _, _), (later, _, _) in pairwise(requests))
    assert requests[3][1] == []
    # The fifth answer ends at token 40 + 5 * 128; the first one lies after the question and its call.
    assert requests[5][1] == [{"after": 680, "drop": [(48, 168)]}, {"after": 808, "drop": [(176, 296)]}]


@pytest.mark.parametrize(("options", "said"), [(["--tokens", "9"], "--tokens 9"), (["--rounds", "0"], "--rounds 0")])
def test_impossible_sizes_are_refused(bench, capsys, options, said):
    assert bench.main(options) == 2
    assert said in capsys.readouterr().err
