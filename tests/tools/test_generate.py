"""The command: what it prints, streamed or not, and what it refuses. Tokens themselves are tested in tests/inference."""

import io
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_dmtd.inference import Engine, SamplingParams
from megatron_dmtd.inference.text import load_tokenizer
from tests.tools.text_model import save_text_model
from tools.evaluate import arguments as evaluate_arguments
from tools.generate import arguments, main

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_text_model(tmp_path_factory.mktemp("text") / "model")


@pytest.fixture(scope="module")
def expected(folder) -> str:
    """The greedy output of the engine on "ab", as text."""
    ids = load_tokenizer(folder)("ab")["input_ids"]
    (completion,) = Engine(folder, device="cpu").generate([ids], max_new_tokens=16, params=SamplingParams(repetition_penalty=5.0))
    return load_tokenizer(folder).decode(list(completion.token_ids), skip_special_tokens=True)


OPTIONS = ["--max-new-tokens", "16", "--repetition-penalty", "5", "--device", "cpu"]


def test_a_single_prompt_is_streamed_after_itself(folder, expected, capsys):
    assert main([str(folder), "ab", *OPTIONS]) == 0
    assert capsys.readouterr().out == f"ab{expected}\n"
    assert len(expected) > 4


def test_several_prompts_are_printed_in_order(folder, expected, tmp_path, capsys):
    (tmp_path / "prompts").write_text("ab\n\nxyz\n")
    arguments = [str(folder), "one", "--prompts", str(tmp_path / "prompts"), "--stats", *OPTIONS]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    heads = [line for line in shown.out.splitlines() if line.startswith("--- ")]
    assert heads == [f"--- {prompt!r}, sample 0, length" for prompt in ("one", "ab", "xyz")]
    assert expected in shown.out
    assert "bidirectional-refresh: 48 tokens in" in shown.err


def test_samples_are_numbered_and_seeded(folder, capsys):
    arguments = [str(folder), "ab", "--n", "2", "--temperature", "1", "--seed", "3", *OPTIONS]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert "sample 0" in first and "sample 1" in first
    assert main(arguments) == 0
    assert capsys.readouterr().out == first


def test_stop_strings_end_the_text_before_them(folder, expected, capsys):
    stop = expected[3]
    assert main([str(folder), "ab", "--stop", stop, *OPTIONS]) == 0
    assert capsys.readouterr().out == f"ab{expected[: expected.index(stop)]}\n"


def test_two_prompts_of_the_same_ids_are_each_shown_as_written(folder, capsys):
    """The tokenizer of a model may make the same ids of two texts; outputs come in the order of the prompts."""
    assert main([str(folder), "ab", "ab<eos>", "c" * 600, *OPTIONS, "--n", "2"]) == 1
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--- ")]
    assert [head.split(",")[0] for head in heads] == ["--- 'ab'"] * 2 + ["--- 'ab<eos>'"] * 2 + [f"--- {'c' * 600!r}"]


def test_the_same_weights_decode_as_vanilla(folder, capsys):
    assert main([str(folder), "ab", "--vanilla", "--stats", *OPTIONS]) == 0
    assert "vanilla: 16 tokens" in capsys.readouterr().err


def test_refusals(folder, tmp_path, capsys):
    assert main([str(folder), *OPTIONS]) == 2
    assert "no prompt" in capsys.readouterr().err
    assert main([str(folder), "--prompts", str(tmp_path / "absent"), *OPTIONS]) == 2
    assert "a file of prompts" in capsys.readouterr().err
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert main([str(tmp_path), "ab", *OPTIONS]) == 2
    assert "no tokenizer" in capsys.readouterr().err
    assert main([str(folder), "ab", "c" * 600, *OPTIONS]) == 1
    shown = capsys.readouterr().out
    assert "refused" in shown and "at most 512 tokens together" in shown
    assert torch.is_grad_enabled()


def test_prompts_come_from_standard_input_too(folder, expected, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\r\n")))
    assert main([str(folder), "--prompts", "-", *OPTIONS]) == 0
    assert capsys.readouterr().out == f"ab{expected}\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert main([str(folder), "--prompts", "-", *OPTIONS]) == 2
    assert "--prompts - is empty" in capsys.readouterr().err


def test_text_that_is_no_unicode_is_refused(folder, tmp_path, capsys):
    assert main([str(folder), "a\udcffb", *OPTIONS]) == 2
    assert "not valid Unicode at character 1" in capsys.readouterr().err
    (tmp_path / "latin").write_bytes("né".encode("latin-1"))
    assert main([str(folder), "--prompts", str(tmp_path / "latin"), *OPTIONS]) == 2
    assert "a file of prompts in UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "nonsense"], "device 'nonsense'"),
        (["--device", "cuda:17"], "device 'cuda:17'"),
        (["--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--max-new-tokens", "9999"], "at most 512 tokens together"),
        (["--temperature", "nan"], "temperature=nan"),
        (["--stop", ""], "stop=('',)"),
        (["--n", "0"], "n=0"),
        (["--no-stream", "--top-p", "0"], "top_p=0.0"),
        (["--max-batch", "0"], "max_batch=0"),
        (["--max-length", "100000"], "max_length=100000"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_printed(folder, capsys, options, message):
    assert main([str(folder), "ab", "--device", "cpu", *options]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and "remedy:" in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("read", [arguments, evaluate_arguments], ids=["generate", "evaluate"])
def test_every_option_says_what_it_does(read, capsys):
    with pytest.raises(SystemExit):
        read(["--help"])
    entries = re.split(r"\n  (?=-)", capsys.readouterr().out.split("\noptions:\n")[1])
    assert len(entries) > 10
    silent = [entry for entry in entries if not re.search(r"\S  +\S|\n {8}", entry.strip())]
    assert silent == []


def test_directories_that_are_no_models_are_named(folder, tmp_path, capsys):
    assert main(["Qwen/Qwen3-0.6B", "ab", *OPTIONS]) == 2
    assert "no directory Qwen/Qwen3-0.6B" in capsys.readouterr().err
    for name, contents, message in (
        ("tokenizer.json", b"{", "transformers cannot read"),
        ("config.json", b"{", "cannot be read"),
        ("config.json", b'{"model_type": "gpt2"}', "model_type 'gpt2'"),
        ("model.safetensors", b"\x00" * 40, "Expecting value"),
        ("config.json", b'{"model_type": "llama", "vocab_size": null}', "no vocab_size"),
        ("model.safetensors.index.json", b"{}", "without a readable weight_map"),
        ("model.safetensors.index.json", b"[]", "not a JSON object"),
    ):
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        (copy / name).write_bytes(contents)
        assert main([str(copy), "ab", *OPTIONS]) == 2, name
        assert message in capsys.readouterr().err
        shutil.rmtree(copy)


def test_a_reader_that_leaves_and_ctrl_c_end_it_quietly(folder):
    command = [sys.executable, "tools/generate.py", str(folder), "ab", "--max-new-tokens", "400", "--device", "cpu", "--stats"]
    options = {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    assert len(process.stdout.read(3)) == 3
    process.stdout.close()
    error = process.stderr.read().decode()
    assert process.wait(timeout=60) == 0 and "Traceback" not in error, error
    process = subprocess.Popen([*command, "--temperature", "9"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    assert len(process.stdout.read(3)) == 3
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode in (130, 0) and b"Traceback" not in error, error
    assert b"tokens/s" in error and (process.returncode == 0 or b"interrupted" in error)
