"""The benchmark runs on a small model, and its own arithmetic is right."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from megatron_dmtd.inference import Engine, EngineConfig

PATH = Path(__file__).parents[3] / "tools" / "bench" / "loops.py"


@pytest.fixture
def bench(monkeypatch):
    spec = importlib.util.spec_from_file_location("bench_loops", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    monkeypatch.setattr(module, "MODEL", sizes | {"vocab_size": 1200})
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


@pytest.mark.parametrize("options", [["--cpu-time"], ["--matrix-dtype", "bfloat16", "--mode", "last_loop", "--threads", "1"]])
def test_every_kind_is_timed_with_every_number_of_loops(bench, tmp_path, capsys, options):
    out = tmp_path / "figures.json"
    kinds = ["vanilla", "bidirectional-refresh"]
    common = ["--loops", "1", "3", "--kinds", *kinds, "--context", "9", "--rounds", "2", "--hf", "--json", str(out)]
    assert bench.main([*common, *options]) == 0
    figures = {(row["kind"], row["loops"]): row for row in json.loads(out.read_text())}
    assert list(figures) == [(kind, loops) for loops in (1, 3) for kind in [*kinds, "transformers"]]
    # Four tokens: 2 layers, n times 5, and 2 more, four times or, but for the last two, once.
    assert [figures["vanilla", loops]["visits"] for loops in (1, 3)] == [36, 76]
    assert [figures["bidirectional-refresh", loops]["visits"] for loops in (1, 3)] == [15, 25]
    assert all(row["tokens_per_s"] > 0 and row.get("share_of_bare", 1) > 0 for row in figures.values())
    assert [figures["vanilla", loops]["limit"] for loops in (1, 3)] == [1, 1]
    layer, head = 64 * (3 * 64 + 2 * 32 + 3 * 96), 1200 * 64
    assert figures["bidirectional-refresh", 3]["limit"] == pytest.approx((76 * layer + 4 * head) / (25 * layer + 4 * head))
    assert "transformers" in capsys.readouterr().out


def test_impossible_numbers_of_loops_are_refused(bench, capsys):
    assert bench.main(["--loops", "0"]) == 2
    assert "--loops 0" in capsys.readouterr().err


def test_the_peer_has_the_engines_weights(bench):
    """Level: fp32 rounding of log probabilities."""
    model, text = bench.random_model(torch.float32), list(range(7, 27))
    engine = Engine(dataclasses.replace(model, schedule=bench.schedule_of("vanilla", 3, "per_loop")), EngineConfig(max_length=64))
    with torch.inference_mode():
        logits = bench.peer_model(model, 3, "per_loop")(torch.tensor([text])).logits[0].double()
    expected = logits[:-1].log_softmax(-1).gather(1, torch.tensor(text)[1:, None])[:, 0]
    assert expected.std() > 0.05
    torch.testing.assert_close(torch.tensor(engine.score(text)).double(), expected, rtol=0, atol=3e-5)
