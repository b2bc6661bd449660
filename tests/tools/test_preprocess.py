from pathlib import Path

import pytest

from megatron_dmtd.data.manifest import read_manifest
from megatron_dmtd.data.tokenizer import train_bpe
from tools.preprocess import main


@pytest.fixture
def arguments(tmp_path):
    train_bpe(["the cat sat"] * 3, vocab_size=270, output_dir=tmp_path / "tokenizer")
    (tmp_path / "texts").mkdir()
    for i in range(30):
        (tmp_path / "texts" / f"{i}.md").write_text(f"the cat {i}")
    (tmp_path / "texts" / "binary.md").write_bytes(b"\xff")
    (tmp_path / "lines.jsonl").write_text('{"content": "sat"}\n')
    inputs = ["--input", str(tmp_path / "texts"), str(tmp_path / "lines.jsonl"), "--pattern", "*.md", "--text-key", "content"]
    return [*inputs, "--tokenizer", str(tmp_path / "tokenizer"), "--output", str(tmp_path / "out")]


def test_the_command_writes_what_it_says(arguments, tmp_path, capsys):
    assert main([*arguments, "--no-progress"]) == 0
    printed = capsys.readouterr()
    manifest = read_manifest(str(tmp_path / "out"))
    assert manifest is not None and manifest.num_documents == 31
    assert f"{tmp_path / 'out'}: 31 documents, {manifest.num_tokens} tokens, 0 empty left out" in printed.out
    assert "1 documents that are not UTF-8 text left out" in printed.out
    assert "it/s" not in printed.err and "documents" not in printed.err


def test_a_heldout_fraction_makes_two_files(arguments, tmp_path, capsys):
    assert main([*arguments, "--heldout-fraction", "0.3"]) == 0
    manifests = [read_manifest(str(tmp_path / name)) for name in ("out-train", "out-heldout")]
    assert sum(manifest.num_documents for manifest in manifests if manifest) == 31
    assert all(manifest is not None and manifest.num_documents > 2 for manifest in manifests)
    assert "documents" in capsys.readouterr().err  # the progress bar


def test_a_refusal_is_printed_and_gives_status_1(arguments, tmp_path, capsys):
    (tmp_path / "out.idx").touch()
    assert main(arguments) == 1
    assert "already there" in capsys.readouterr().err
    assert not Path(tmp_path / "out.bin").exists()
    assert main([*arguments, "--overwrite"]) == 0


def test_the_mask_id_can_be_given(arguments, tmp_path):
    assert main([*arguments, "--mask-token-id", "400"]) == 0
    manifest = read_manifest(str(tmp_path / "out"))
    assert manifest is not None and manifest.mask_token_id == 400
