"""The command. What the conversions do is tested in tests/conversion."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_dmtd.conversion.weight_files import WeightFiles
from tools.convert import main

CYCLE_OPTIONS = ["--variant", "causal-refresh", "--num-parallel-layers", "1", "--mask-token-id", "9"]


@pytest.fixture
def hf_directory(tmp_path: Path) -> str:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "hf")
    return str(tmp_path / "hf")


def test_import_inspect_export(hf_directory, tmp_path, capsys):
    start, out, plain = (str(tmp_path / name) for name in ("start", "out", "plain"))
    assert main(["import", hf_directory, start, *CYCLE_OPTIONS, "--cycle-length", "2"]) == 0
    assert "method: causal-refresh, cycle length 2, parallel layers 1, mask 9\n" in capsys.readouterr().out
    assert main(["inspect", start]) == 0
    shown = capsys.readouterr().out
    assert "float32   [128, 8]         embedding.word_embeddings.weight\n" in shown
    assert f"{start}: training checkpoint\n" in shown
    assert main(["export", start, out, "--dtype", "bfloat16"]) == 0
    assert "method: causal-refresh, cycle length 2" in capsys.readouterr().out
    assert {spec.dtype for spec in WeightFiles(out).specs.values()} == {torch.bfloat16}
    assert main(["export", start, plain, "--vanilla"]) == 0
    assert "method: vanilla\n" in capsys.readouterr().out


def test_without_cycle_options_a_plain_decoder_stays_vanilla(hf_directory, tmp_path, capsys):
    assert main(["import", hf_directory, str(tmp_path / "start")]) == 0
    assert "method: vanilla\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        (["--variant", "causal-refresh"], "no --num-parallel-layers, --mask-token-id"),
        (["--cycle-length", "2"], "no --variant, --num-parallel-layers, --mask-token-id"),
    ],
)
def test_half_a_method_is_refused(hf_directory, tmp_path, capsys, options, missing):
    assert main(["import", hf_directory, str(tmp_path / "start"), *options]) == 2
    assert f"ConfigError\nfound: {missing}\n" in capsys.readouterr().err
    assert not (tmp_path / "start").exists()


def test_a_refusal_is_a_message_and_not_a_traceback(tmp_path, capsys):
    assert main(["export", str(tmp_path / "absent"), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("CheckpointError\nfound: ") and "Traceback" not in error


def test_it_runs_as_a_command_without_megatron(hf_directory):
    root = Path(__file__).parents[2]
    code = (
        f"import runpy, sys; sys.argv = ['convert.py', 'inspect', {hf_directory!r}]; sys.modules['megatron'] = None; "
        "runpy.run_path('tools/convert.py', run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Hugging Face directory" in result.stdout
