"""The command. What the conversions do is tested in tests/conversion."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_dmtd.weights.safetensors_files import WeightFiles
from megatron_dmtd.weights.torch_dist import CheckpointTensors
from tests.families.transformers_models import model_of, saved
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


def test_a_damaged_checkpoint_is_refused_by_every_command_before_anything_is_written(hf_directory, tmp_path, capsys):
    start, out = tmp_path / "start", tmp_path / "out"
    assert main(["import", hf_directory, str(start)]) == 0
    part = start / "__2_0.distcp"
    data = bytearray(part.read_bytes())
    numbers = CheckpointTensors(start).read("decoder.layers.0.mlp.linear_fc2.weight").numpy().tobytes()
    data[data.index(numbers) + len(numbers) // 2] ^= 1  # where nothing but a checksum notices it
    part.write_bytes(data)
    commands = {
        "export": ["export", str(start), str(out)],
        "inspect": ["inspect", str(start)],
        "verify": ["verify", hf_directory, str(start)],
        "diff": ["diff", str(start), hf_directory],
    }
    for command in commands.values():
        assert main(command) == 2
        assert "__2_0.distcp (" in capsys.readouterr().err
        assert not out.exists()
    statuses = {name: main([*command, "--skip-checksums"]) for name, command in commands.items()}
    assert statuses == {"export": 0, "inspect": 0, "verify": 1, "diff": 1}
    shown = capsys.readouterr()
    assert shown.err.count(f"{start}: not compared with their checksums\n") == 3
    assert "files: not compared with their checksums\n" in shown.out


def test_a_bare_checkpoint_without_checksums_is_accepted_with_a_warning(hf_directory, tmp_path, capsys):
    start = tmp_path / "start"
    assert main(["import", hf_directory, str(start)]) == 0
    assert main(["inspect", str(start)]) == 0
    assert "files: as checksums.sha256 records them\n" in capsys.readouterr().out
    (start / "checksums.sha256").unlink()
    assert main(["verify", str(start), hf_directory]) == 0
    assert capsys.readouterr().err == f"{start}: no checksums.sha256: damage inside a tensor would go unnoticed\n"
    assert main(["inspect", hf_directory]) == 0
    assert "files: no checksums in this format\n" in capsys.readouterr().out


def test_it_runs_as_a_command_without_megatron(hf_directory):
    root = Path(__file__).parents[2]
    code = (
        f"import runpy, sys; sys.argv = ['convert.py', 'inspect', {hf_directory!r}]; sys.modules['megatron'] = None; "
        "runpy.run_path('tools/convert.py', run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Hugging Face directory" in result.stdout


def test_verify_and_diff_tell_equal_from_different_by_their_status(hf_directory, tmp_path, capsys):
    start, other = str(tmp_path / "start"), str(tmp_path / "other")
    assert main(["import", hf_directory, start, *CYCLE_OPTIONS]) == 0
    assert main(["export", start, other, "--dtype", "bfloat16"]) == 0
    for command in ("verify", "diff"):
        capsys.readouterr()
        assert main([command, start, other, "--dtype", "bfloat16"]) == 0
        assert capsys.readouterr().out == "the same model: 24 tensors equal bit for bit\n"
        assert main([command, hf_directory, start, "--any-method"]) == 0
        assert main([command, hf_directory, start]) == 1
        said = capsys.readouterr().out
        assert "cycle.variant is vanilla and causal-refresh\n" in said and "--any-method ignores it\n" in said
        assert main([command, start, other]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "different: 0 tensors equal bit for bit"
    sizes = [float(line.split()[0]) for line in lines if line.endswith(".weight") and line.lstrip()[0].isdigit()]
    assert len(sizes) > 10 and sizes == sorted(sizes, reverse=True) and 0 < sizes[0] < 2**-8
    assert main(["verify", start, str(tmp_path / "absent")]) == 2


def _run_limited(arguments: list[str], *, file_bytes: int) -> subprocess.CompletedProcess[str]:
    """The command in a process whose files cannot grow beyond a size: writing fails in its middle, as on a full disk."""
    code = (
        "import resource, runpy, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({file_bytes}, {file_bytes})); "
        f"sys.argv = ['convert.py', *{arguments!r}]; runpy.run_path('tools/convert.py', run_name='__main__')"
    )
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    root = Path(__file__).parents[2]
    return subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, env=environment)


def test_a_write_that_fails_in_its_middle_leaves_nothing(hf_directory, tmp_path):
    assert main(["import", hf_directory, str(tmp_path / "start")]) == 0
    for command, source in (("import", hf_directory), ("export", str(tmp_path / "start"))):
        result = _run_limited([command, source, str(tmp_path / "out")], file_bytes=1500)
        assert result.returncode == 2, result.stderr
        assert "File too large while writing" in result.stderr and "Traceback" not in result.stderr
        assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "start"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_terminated_conversion_leaves_nothing(hf_directory, tmp_path, number, status):
    """Reading one of the files takes five seconds, so that the signal meets the conversion in the middle of its work."""
    assert main(["import", hf_directory, str(tmp_path / "start")]) == 0
    victim = next(path for path in (tmp_path / "start").glob("*.distcp") if path.stat().st_size > 2000)
    code = (
        "import builtins, runpy, sys, time\n"
        "original = builtins.open\n"
        "def slow(path, *rest, **options):\n"
        f"    if str(path) == {str(victim)!r}:\n"
        "        print('reading', flush=True)\n"
        "        time.sleep(5)\n"
        "    return original(path, *rest, **options)\n"
        "builtins.open = slow\n"
        f"sys.argv = ['convert.py', 'export', {str(tmp_path / 'start')!r}, {str(tmp_path / 'out')!r}, '--skip-checksums']\n"
        "runpy.run_path('tools/convert.py', run_name='__main__')\n"
    )
    root = Path(__file__).parents[2]
    process = subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "reading\n"
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".partial")]
    process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert process.returncode == status and "Traceback" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "start"]


def test_gguf_and_plain_directories_are_refused_alike_when_they_are_neither(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["import", str(tmp_path / "empty"), str(tmp_path / "out")]) == 2
    assert "a Hugging Face model directory" in capsys.readouterr().err


def test_inspect_names_the_parts_that_only_some_models_have(tmp_path, capsys):
    scaling = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    windows = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
    saved(tmp_path / "hf", model_of("qwen2", rope_parameters=scaling, **windows))
    assert main(["inspect", str(tmp_path / "hf")]) == 0
    assert "biases of q, k, v, window of 6 in layers [2, 3], rope scaling yarn, factor 4\n" in capsys.readouterr().out
