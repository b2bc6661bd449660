"""The command: what it prints, streamed or not, and what it refuses. Tokens themselves are tested in tests/inference."""

import pytest
import torch
from transformers import AutoTokenizer

from megatron_dmtd.inference import Engine, SamplingParams
from megatron_dmtd.inference.text import StopStrings, load_tokenizer
from tests.tools.text_model import save_text_model
from tools.generate import main


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


def test_stop_strings_are_seen_across_tokens(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    watch, ids = StopStrings(tokenizer, ("né", "zz")), tokenizer("début né à")["input_ids"]
    ends = [index for index in range(1, len(ids) + 1) if watch.ends(ids[:index])]
    assert tokenizer.decode(ids[: ends[0]]) == "début né"
    assert watch.text(ids) == "début "
    assert watch.text(tokenizer("plain")["input_ids"]) == "plain"


def test_the_same_weights_decode_as_vanilla(folder, capsys):
    assert main([str(folder), "ab", "--vanilla", "--stats", *OPTIONS]) == 0
    assert "vanilla: 16 tokens" in capsys.readouterr().err


def test_refusals(folder, tmp_path, capsys):
    assert main([str(folder), *OPTIONS]) == 2
    assert "no prompt" in capsys.readouterr().err
    assert main([str(folder), "--prompts", str(tmp_path / "absent"), *OPTIONS]) == 2
    assert "a file of prompts" in capsys.readouterr().err
    assert main([str(tmp_path), "ab", *OPTIONS]) == 2
    assert "no tokenizer" in capsys.readouterr().err
    assert main([str(folder), "ab", "c" * 600, *OPTIONS]) == 1
    shown = capsys.readouterr().out
    assert "refused" in shown and "at most 512 tokens together" in shown
    assert torch.is_grad_enabled()
