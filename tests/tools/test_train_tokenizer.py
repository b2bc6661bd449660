import pytest

from megatron_dmtd.data.corpora.documents import is_heldout
from megatron_dmtd.data.corpora.tokenizer import load_tokenizer
from tools.train_tokenizer import main


@pytest.fixture
def arguments(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(60):
        heldout = is_heldout(f"{i}.txt", 0.1)
        (texts / f"{i}.txt").write_text("zebra" if heldout else "the cat sat on the mat")
    return ["--input", str(texts), "--output", str(tmp_path / "tokenizer"), "--no-progress"]


def test_the_command_saves_a_tokenizer_of_the_size_it_says(arguments, tmp_path, capsys):
    assert main([*arguments, "--vocab-size", "262"]) == 0
    printed = capsys.readouterr().out
    assert f"{tmp_path / 'tokenizer'}: 262 tokens" in printed
    assert len(load_tokenizer(tmp_path / "tokenizer")) == 262


def test_a_small_corpus_is_reported(arguments, capsys):
    assert main([*arguments, "--vocab-size", "5000"]) == 0
    assert "too few frequent pairs for 5000" in capsys.readouterr().out


def test_heldout_documents_are_not_learnt_from(arguments, tmp_path):
    assert main([*arguments, "--vocab-size", "5000"]) == 0
    assert len(load_tokenizer(tmp_path / "tokenizer").tokenize("zebra")) == 1
    assert main([*arguments, "--vocab-size", "5000", "--heldout-fraction", "0.1", "--overwrite"]) == 0
    assert len(load_tokenizer(tmp_path / "tokenizer").tokenize("zebra")) == 5


def test_pairs_need_the_frequency_asked_for(arguments, tmp_path):
    assert main([*arguments, "--vocab-size", "5000", "--min-frequency", "1000"]) == 0
    assert len(load_tokenizer(tmp_path / "tokenizer")) == 259


def test_a_fraction_that_is_none_is_refused(arguments, capsys):
    assert main([*arguments, "--vocab-size", "300", "--heldout-fraction", "-0.1"]) == 1
    assert "a held-out fraction of -0.1" in capsys.readouterr().err


def test_a_refusal_is_printed_and_gives_status_1(arguments, tmp_path, capsys):
    assert main([*arguments, "--vocab-size", "100"]) == 1
    assert "at least 259" in capsys.readouterr().err
    assert not (tmp_path / "tokenizer").exists()


def test_ctrl_c_writes_nothing_and_gives_status_130(arguments, tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("tools.train_tokenizer.train_bpe", interrupted)
    assert main([*arguments, "--vocab-size", "262"]) == 130
    assert capsys.readouterr().err == "interrupted: no tokenizer was written\n"
    assert not (tmp_path / "tokenizer").exists()


def test_a_document_that_is_not_text_is_refused_or_left_out_with_status_3(arguments, tmp_path, capsys):
    (tmp_path / "texts" / "binary.txt").write_bytes(b"\xff")
    assert main([*arguments, "--vocab-size", "262"]) == 1
    assert "binary.txt" in capsys.readouterr().err
    assert main([*arguments, "--vocab-size", "262", "--skip-bad"]) == 3
    assert "skipped 1 documents that cannot be used, the first: line 1 of " in capsys.readouterr().err
    assert len(load_tokenizer(tmp_path / "tokenizer")) == 262
