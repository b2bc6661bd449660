"""The comparison with other engines: what is asked of each, what its figures are, and what is said of one that is absent."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tools.bench import peers

#: An engine that needs a second of wall time and three of CPU time until the first tokens, and twice that for the rest.
FAKE = """#!{python}
import json, pathlib, sys
asked = pathlib.Path({asked!r})
print("loading"); print('PEER {{}}', flush=True)
for line in sys.stdin:
    request = json.loads(line)
    with asked.open("a") as file: file.write(line)
    rest = len(request["prompts"]) * (request["new"] - 1)
    print("PEER " + json.dumps({{"wall_s": [1.0, 2.0], "cpu_s": [3.0, 6.0], "rest": rest}}), flush=True)
"""
SMALL = ["--threads", "1", "--batches", "2", "--prompt", "8", "--new", "4", "--prefill", "20", "--rounds", "1"]


@pytest.fixture(autouse=True)
def small_model(monkeypatch):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    monkeypatch.setattr(peers, "MODEL", peers.MODEL | sizes | {"vocab_size": 600, "num_hidden_layers": 2})


def fake_vllm(folder: Path, program: str) -> Path:
    python = folder / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(program)
    python.chmod(0o755)
    return folder


def test_engines_that_are_there_take_turns_and_absent_ones_are_named(tmp_path, capsys):
    asked, out = tmp_path / "asked.jsonl", tmp_path / "figures.json"
    folder = fake_vllm(tmp_path / "peers", FAKE.format(python=sys.executable, asked=str(asked)))
    engines = ["--engines", "vanilla", "bidirectional-refresh", "vllm", "llama.cpp"]
    assert peers.main([*SMALL, *engines, "--peers", str(folder), "--json", str(out)]) == 0
    figures, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert figures["absent"] == ["llama.cpp"]
    assert f"llama.cpp is absent; what installs it: python tools/bench/peers.py --setup {folder}" in printed
    shape = [(row["engine"], row["batch"], row["length"], row["new"]) for row in figures["cells"]]
    names = ("vanilla", "bidirectional-refresh", "vllm")
    assert shape == [(name, 2, 8, 5) for name in names] + [(name, 1, 20, 1) for name in names]
    assert all(row["tokens_per_s"] > 0 for row in figures["cells"])
    ours, _, decoded, _, _, prompt = figures["cells"]
    assert decoded["tokens_per_s"] == 2 * 4 / 2.0 and prompt["tokens_per_s"] == 20 / 1.0
    assert ours["to_vanilla"] == 1.0 and decoded["to_vanilla"] == pytest.approx(4.0 / ours["tokens_per_s"])
    requests = [json.loads(line) for line in asked.read_text().splitlines()]
    assert [(len(one["prompts"]), len(one["prompts"][0]), one["new"]) for one in requests] == [(2, 8, 5)] * 2 + [(1, 20, 1)] * 2
    assert requests[0]["prompts"] != requests[1]["prompts"], "a cached prompt would cost nothing"


def test_cpu_time_is_of_one_thread(tmp_path):
    folder = fake_vllm(tmp_path / "peers", FAKE.format(python=sys.executable, asked=str(tmp_path / "asked")))
    out = tmp_path / "figures.json"
    options = ["--engines", "vllm", "--cpu-time", "--peers", str(folder), "--json", str(out)]
    assert peers.main([*SMALL, "--threads", "2", *options]) == 0
    figures = json.loads(out.read_text())
    assert figures["threads"] == 1 and [row["tokens_per_s"] for row in figures["cells"]] == [2 * 4 / 6.0, 20 / 3.0]
    assert {row["to_vanilla"] for row in figures["cells"]} == {None}


def test_an_engine_that_fails_is_refused_with_its_last_words(tmp_path, capsys):
    folder = fake_vllm(tmp_path / "peers", f"#!{sys.executable}\nraise SystemExit('no such instruction')\n")
    assert peers.main([*SMALL, "--engines", "vllm", "--peers", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "vllm ended with status 1: no such instruction" in error and "--engines" in error


def test_impossible_requests_are_refused(capsys):
    for options, word in (
        (["--new", "6"], "--new 6"),
        (["--prefill", "5000"], "5001"),
        (["--batches", "0"], "batches [0]"),
        (["--dtype", "bfloat16"], "llama.cpp"),
    ):
        assert peers.main(options) == 2
        assert word in capsys.readouterr().err


def test_set_up_runs_every_command_or_names_the_one_that_failed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peers, "SETUP", {"a": [["touch", "{dir}/a"]], "b": [["touch", "{dir}/b"]]})
    assert peers.main(["--setup", str(tmp_path / "new")]) == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a", "b"]
    monkeypatch.setattr(peers, "SETUP", {"a": [["false"]]})
    assert peers.main(["--setup", str(tmp_path)]) == 2 and "failed: false" in capsys.readouterr().err


def test_tokens_count_from_the_moment_when_every_request_has_one():
    steps, moments = iter([{}, {"a": 1}, {"a": 2, "b": 1}, {"a": 3, "b": 2}, {"b": 3}, None]), []
    assert peers.until_first(lambda: next(steps), 2, lambda: moments.append(None)) == 3
    assert len(moments) == 1


def test_the_gguf_file_holds_the_same_weights(tmp_path):
    """Level: bitwise."""
    import gguf
    from transformers import AutoModelForCausalLM

    peers.write_model(tmp_path)
    stored = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    weights = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert len(stored) == 2 + 2 * len(peers.GGUF_NAMES)
    for layer in range(2):
        for name, own in peers.GGUF_NAMES.items():
            assert torch.equal(stored[f"blk.{layer}.{own}.weight"], weights[f"model.layers.{layer}.{name}.weight"]), name
    assert torch.equal(stored["token_embd.weight"], weights["model.embed_tokens.weight"])
