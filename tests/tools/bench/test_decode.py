"""The benchmark runs in every mode on a small model, and its own arithmetic is right."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from megatron_dmtd.platform import machine

PATH = Path(__file__).parents[3] / "tools" / "bench" / "decode.py"
SMALL = ["--layers", "1", "1", "--rounds", "2", "--threads", "1"]


@pytest.fixture
def bench(monkeypatch):
    spec = importlib.util.spec_from_file_location("bench_decode", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    monkeypatch.setattr(module, "MODEL", module.MODEL | sizes | {"vocab_size": 1200, "mask_token_id": 1199})
    for name, value in {"READ_BYTES": 8 << 20, "LOOP_REPEATS": 100_000, "WIDTH": {"cpu": 64}, "ROUNDS": 2}.items():
        monkeypatch.setattr(machine, name, value)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


def test_every_kind_is_timed_at_every_batch_and_context(bench, tmp_path, capsys):
    out = tmp_path / "figures.json"
    options = ["--batches", "1", "3", "--contexts", "8", "20", "--profile", "--hf", "--json", str(out)]
    assert bench.main([*SMALL, *options]) == 0
    figures = json.loads(out.read_text())
    assert [(row["batch"], row["context"]) for row in figures["cells"][::5]] == [(1, 8), (1, 20), (3, 8), (3, 20)]
    assert [row["kind"] for row in figures["cells"][:5]] == list(bench.KINDS)
    assert all(row["tokens_per_s"] > 0 and row["share_of_bare"] > 0 for row in figures["cells"])
    for row in figures["cells"]:
        assert row["share_of_machine"] == pytest.approx(row["machine_limit_ms"] / row["cycle_ms"])
    assert [row["ratio"] for row in figures["cells"] if row["kind"] == "vanilla"] == [1.0] * 4
    assert set(figures["hf_tokens_per_s"]) == set(figures["profile"]) == set(bench.KINDS)
    assert {"norm", "linear", "attend", "rest"} <= set(figures["profile"]["vanilla"])
    assert "Hugging Face generate, vanilla, batch 1, context 8" in capsys.readouterr().out


def test_alignment_and_cpu_time(bench, tmp_path):
    out = tmp_path / "figures.json"
    options = [
        "--alignment",
        "--cpu-time",
        "--matrix-dtype",
        "bfloat16",
        "--kinds",
        "vanilla",
        "causal-refresh",
        "--batches",
        "2",
    ]
    assert bench.main([*SMALL, *options, "--contexts", "8", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["alignment"]
    assert (row["kind"], row["batch"]) == ("causal-refresh", 2)
    assert row["gain"] == row["aligned"] / row["free"]


def test_prompts_are_timed_to_their_first_token(bench, tmp_path):
    out = tmp_path / "figures.json"
    kinds = ["--kinds", "vanilla", "bidirectional-refresh"]
    assert bench.main([*SMALL, *kinds, "--prefill", "21", "--json", str(out)]) == 0
    vanilla, refresh = json.loads(out.read_text())["prefill"]
    assert (vanilla["kind"], vanilla["length"], vanilla["time_to_vanilla"]) == ("vanilla", 21, 1.0)
    assert refresh["tokens_per_s"] > 0 and refresh["share_of_limit"] > 0


def test_the_limit_by_weight_traffic_is_that_of_the_design(bench):
    """Qwen3-4B: 36 layers, 28 of them parallel, and a head that weighs 3.85 layers."""
    bench.MODEL |= {"num_parallel_layers": 28, "num_sequential_layers": 8}
    _, model = bench.random_model(None)
    layer = sum(linear.num_bytes for linear in model.layers[0].linears)
    head = model.head.num_bytes / layer
    assert bench.traffic_limit(model) == pytest.approx(4 * (36 + head) / (28 + 4 * (8 + head)))


def test_a_filled_engine_decodes_from_where_it_stands(bench):
    _, model = bench.random_model((1, 1))
    engine = bench.filled_engine(model, "bidirectional-refresh", [8, 12], max_new=8, options={})
    bench.cycle_s(engine)
    assert engine.stats.num_parallel_passes == 1 and engine.stats.num_new_tokens == 8
    engine.check_integrity()


def test_kernels_that_cannot_run_are_refused(bench, capsys):
    bench.MODEL |= {"head_dim": 24}
    assert bench.main([*SMALL, "--kernels", "native", "--batches", "1"]) == 2
    assert "heads of 24" in capsys.readouterr().err


def test_the_limit_of_a_cycle_is_that_of_its_passes(bench):
    """Reading decides at one row, multiplying at many."""
    _, model = bench.random_model([1, 1])
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96  # queries, keys and values; output; gate, up and down
    head, cached = 1200 * 64, 2 * 32 * 4  # bytes of K and V of a token and layer
    reading = machine.Machine(bytes_per_s=1.0, flops_per_s={torch.float32: float("inf")})
    assert bench.machine_limit_s(model, "vanilla", 1, 0, reading) == 4 * 4 * (2 * layer + head)
    assert bench.machine_limit_s(model, "causal-norefresh", 1, 0, reading) == 4 * layer + 4 * 4 * (layer + head)
    assert bench.machine_limit_s(model, "vanilla", 3, 10, reading) == 4 * (4 * (2 * layer + head) + 2 * 3 * 10 * cached)
    multiplying = machine.Machine(bytes_per_s=float("inf"), flops_per_s={torch.float32: 1.0})
    assert bench.machine_limit_s(model, "vanilla", 5, 9, multiplying) == 4 * 2 * 5 * (2 * layer + head)
    norefresh, refresh = (
        bench.machine_limit_s(model, kind, 5, 9, multiplying) for kind in ("causal-norefresh", "bidirectional-refresh")
    )
    assert norefresh == 4 * 2 * 5 * (2 * layer + head) and refresh == norefresh + 2 * 4 * 5 * layer
