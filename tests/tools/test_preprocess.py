from pathlib import Path

import pytest

from megatron_dmtd.data.batches.manifest import read_manifest
from megatron_dmtd.data.corpora.tokenizer import train_bpe
from tools.preprocess import main


@pytest.fixture
def arguments(tmp_path):
    train_bpe(["the cat sat"] * 3, vocab_size=270, output_dir=tmp_path / "tokenizer")
    (tmp_path / "texts").mkdir()
    for i in range(30):
        (tmp_path / "texts" / f"{i}.md").write_text(f"the cat {i}")
    (tmp_path / "lines.jsonl").write_text('{"content": "sat"}\n')
    inputs = ["--input", str(tmp_path / "texts"), str(tmp_path / "lines.jsonl"), "--pattern", "*.md", "--text-key", "content"]
    return [*inputs, "--tokenizer", str(tmp_path / "tokenizer"), "--output", str(tmp_path / "out")]


def test_the_command_writes_what_it_says(arguments, tmp_path, capsys):
    assert main([*arguments, "--no-progress"]) == 0
    printed = capsys.readouterr()
    manifest = read_manifest(str(tmp_path / "out"))
    assert manifest is not None and manifest.num_documents == 31
    assert f"{tmp_path / 'out'}: 31 documents, {manifest.num_tokens} tokens" in printed.out
    assert "tokenising with gigatoken: its ids equal those of tokenizers on " in printed.out
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


def test_documents_left_out_are_counted_and_give_status_3(arguments, tmp_path, capsys):
    (tmp_path / "texts" / "binary.md").write_bytes(b"\xff")
    (tmp_path / "texts" / "empty.md").touch()
    assert main([*arguments, "--no-progress"]) == 1
    assert f"line 1 of {tmp_path / 'texts' / 'binary.md'}" in capsys.readouterr().err
    assert main([*arguments, "--no-progress", "--skip-bad"]) == 3
    assert "skipped 2 documents (empty: 1, not UTF-8: 1)" in capsys.readouterr().err


def test_the_bar_tells_documents_and_tokens_per_second_and_the_time_left(arguments, tmp_path, capsys):
    assert main([*arguments, "--workers", "1"]) == 0
    bar = capsys.readouterr().err
    assert "31 documents, " in bar and "tokens/s" in bar and "100%" in bar and "<00:00" in bar


def test_shards_have_names_of_their_own(arguments, tmp_path):
    for index in range(2):
        assert main([*arguments, "--shard", f"{index}/2", "--no-progress"]) == 0
    manifests = [read_manifest(str(tmp_path / f"out-{index:05d}-of-00002")) for index in range(2)]
    assert [manifest.num_documents for manifest in manifests if manifest] == [30, 1]


def test_merge_joins_the_shards_to_what_one_run_writes(arguments, tmp_path, capsys):
    assert main([*arguments, "--no-progress"]) == 0
    expected = [(tmp_path / f"out.{suffix}").read_bytes() for suffix in ("bin", "idx", "json")]
    for index in range(2):
        assert main([*arguments, "--shard", f"{index}/2", "--no-progress"]) == 0
    manifests = [str(path) for path in tmp_path.glob("out-*-of-*.json")]
    assert main(["merge", str(tmp_path / "merged"), *manifests]) == 0
    assert "shard 0 of 2, in order" in (printed := capsys.readouterr().out) and "merged: 31 documents" in printed
    assert [(tmp_path / f"merged.{suffix}").read_bytes() for suffix in ("bin", "idx", "json")] == expected
    assert main(["merge", str(tmp_path / "merged"), *manifests]) == 1
    assert "already there" in capsys.readouterr().err
    assert main(["merge", str(tmp_path / "merged"), *manifests, "--overwrite"]) == 0
    assert main(["merge", str(tmp_path / "other"), manifests[0]]) == 1
    assert "of 2" in capsys.readouterr().err


@pytest.mark.parametrize("shard", ["1", "a/b"])
def test_a_shard_that_is_none_is_wrong_usage(arguments, shard):
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--shard", shard])
    assert caught.value.code == 2


def test_verify_passes_what_was_made_and_inspect_shows_it(arguments, tmp_path, capsys):
    assert main([*arguments, "--no-progress"]) == 0
    capsys.readouterr()
    prefix, tokenizer = str(tmp_path / "out"), str(tmp_path / "tokenizer")
    assert main(["verify", prefix, "--tokenizer", tokenizer]) == 0
    assert "31 documents" in (printed := capsys.readouterr().out) and "in order" in printed
    assert "31 documents tokenised again by the reference" in printed
    assert main(["inspect", prefix, "--tokenizer", tokenizer, "--document", "30"]) == 0
    # "sat" is one token, EOS the second; the first token of a document is no target
    assert capsys.readouterr().out == "document 30: 2 tokens, 1 targets\n|[sat]<|endoftext|>\n"
    assert main(["inspect", prefix, "--tokenizer", tokenizer, "--document", "31"]) == 1
    assert "document 31 of" in capsys.readouterr().err


def test_verify_without_a_manifest_says_what_it_could_not_check(arguments, tmp_path, capsys):
    assert main([*arguments, "--no-progress"]) == 0
    (tmp_path / "out.json").unlink()
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert "no manifest, so only the format was checked" in capsys.readouterr().out


def test_verify_finds_a_changed_token_and_gives_status_1(arguments, tmp_path, capsys):
    assert main([*arguments, "--no-progress"]) == 0
    tokens = bytearray((tmp_path / "out.bin").read_bytes())
    tokens[0] ^= 1
    (tmp_path / "out.bin").write_bytes(bytes(tokens))
    assert main(["verify", str(tmp_path / "out")]) == 1
    assert "sha256 of the tokens" in capsys.readouterr().err


def test_an_interrupted_command_says_how_to_resume(arguments, tmp_path, capsys, monkeypatch):
    import megatron_dmtd.data.corpora.preprocess as room

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(room, "_write", interrupted)  # Ctrl-C arrives wherever the work is
    assert main([*arguments, "--no-progress"]) == 130
    assert "run the same command to resume" in capsys.readouterr().err


def test_packing_tells_what_each_way_costs(arguments, tmp_path, capsys):
    assert main([*arguments, "--no-progress"]) == 0
    capsys.readouterr()
    assert main(["packing", str(tmp_path / "out"), "--seq-length", "16"]) == 0
    concatenated, fitted = capsys.readouterr().out.splitlines()
    assert concatenated.startswith("concatenate: 31 documents in ") and "% of the slots are padding" in concatenated
    assert fitted.startswith("best-fit: 31 documents in ") and fitted.endswith("0.00 % of the documents are cut")
    assert main(["packing", str(tmp_path / "out"), "--seq-length", "15"]) == 1
    assert "rows of 15 slots with cycles of 4" in capsys.readouterr().err
