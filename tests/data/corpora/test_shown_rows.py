"""The rows that are shown are those of the run, whether its recipe or options describe it; and the command around them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dmtd.config import to_yaml
from megatron_dmtd.data.batches.dataset import PackedDataset
from megatron_dmtd.data.batches.manifest import Manifest
from megatron_dmtd.data.corpora.shown_rows import RowOptions, open_rows
from megatron_dmtd.data.corpora.tokenizer import train_bpe
from megatron_dmtd.errors import ConfigError, DataError
from tests.support.tiny import tiny_config
from tools.preprocess import main

ROOT = Path(__file__).parents[3]


def write_manifest(prefix: str, **fields) -> None:
    """With zeros where nothing else is said."""
    missing = dataclasses.MISSING
    required = [item.name for item in dataclasses.fields(Manifest) if item.default is missing and item.default_factory is missing]
    texts = {"dtype": "uint16", "source": "test", "split": "all", "tokenizer_sha256": ""}
    Path(f"{prefix}.json").write_text(json.dumps(dict.fromkeys(required, 0) | texts | fields))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tokenizer, and a corpus in two parts made with it."""
    folder = tmp_path_factory.mktemp("rows")
    train_bpe(["the cat sat"] * 3, vocab_size=270, output_dir=folder / "tokenizer")
    for name, animal in (("cats", "cat"), ("dogs", "dog")):
        lines = [json.dumps({"text": f"the {animal} {'sat ' * (n % 9)}"}) for n in range(40)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        command = [
            "--input",
            str(folder / f"{name}.jsonl"),
            "--tokenizer",
            str(folder / "tokenizer"),
            "--output",
            str(folder / name),
        ]
        assert main([*command, "--no-progress", "--workers", "1"]) == 0
    return folder


def _recipe(folder: Path, tmp_path: Path, **data) -> str:
    corpus = {
        "train": (str(folder / "cats"), str(folder / "dogs")),
        "valid": (str(folder / "dogs"),),
        "tokenizer": str(folder / "tokenizer"),
    }
    config = tiny_config(data=corpus | {"packing": "best-fit", "shuffle_seed": 5, "pad_token_id": 7} | data)
    (tmp_path / "recipe.yaml").write_text(to_yaml(config))
    return str(tmp_path / "recipe.yaml")


@pytest.mark.parametrize("weights", [(), (3.0, 1.0)], ids=["one-corpus", "blend"])
def test_the_rows_of_a_recipe_are_those_that_its_run_trains_on(folder, tmp_path, weights):
    from megatron_dmtd.config import from_yaml
    from megatron_dmtd.training.rows import open_corpora

    recipe = _recipe(folder, tmp_path, train_weights=weights, cache_dir=str(tmp_path / "cache"))
    trained = open_corpora(
        dataclasses.replace(from_yaml(recipe), model=dataclasses.replace(from_yaml(recipe).model, vocab_size=300))
    )
    shown, held_out = (open_rows(RowOptions(config=recipe, held_out=flag)).rows for flag in (False, True))
    for index in range(2 * trained.train.rows_per_epoch):
        assert shown[index].tokens_N.tolist() == trained.train[index].tokens_N.tolist()
    assert held_out.rows_per_epoch == trained.valid.rows_per_epoch
    assert held_out[0].tokens_N.tolist() == trained.valid[0].tokens_N.tolist()


def test_options_alone_are_enough_and_come_before_the_recipe(folder, tmp_path):
    options = {"prefix": (str(folder / "dogs"),), "tokenizer": str(folder / "tokenizer"), "seq_length": 16, "shuffle_seed": 9}
    alone = open_rows(RowOptions(**options))
    both = open_rows(RowOptions(**options, config=_recipe(folder, tmp_path), packing="concatenate", cycle_length=2))
    assert isinstance(alone.rows, PackedDataset) and (alone.cycle_length, both.cycle_length) == (4, 2)
    assert alone.rows.shuffle_seed == both.rows.shuffle_seed == 9 and alone.rows.seq_length == both.rows.seq_length == 16
    assert (alone.rows.pad_token_id, both.rows.pad_token_id) == (1, 7)  # <|pad|> of the tokenizer, and the recipe's


def test_what_is_missing_is_named_and_another_tokenizer_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="token files, a tokenizer, a row length"):
        open_rows(RowOptions())
    train_bpe(["other words"] * 3, vocab_size=262, output_dir=tmp_path / "other")
    with pytest.raises(DataError, match="the tokenizer that made"):
        open_rows(RowOptions(prefix=(str(folder / "cats"),), tokenizer=str(tmp_path / "other"), seq_length=16))


def test_the_command_shows_text_tables_and_pages(folder, tmp_path, capsys):
    arguments = ["rows", str(folder / "cats"), "--tokenizer", str(folder / "tokenizer"), "--seq-length", "32"]
    assert main([*arguments, "--row", "1", "--count", "2"]) == 0
    text = capsys.readouterr().out
    assert [line[:5] for line in text.splitlines() if line.startswith("row")] == ["row 1", "row 2"]
    assert "[the" in text.replace("|", "") or "the" in text.replace("|", "").replace("[", "").replace("]", "")
    assert "\x1b" not in text
    assert main([*arguments, "--color", "always"]) == 0
    assert "\x1b[33m|" in capsys.readouterr().out
    assert main([*arguments, "--slots"]) == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if " -> " in line]) > 10
    assert main([*arguments, "--html", str(tmp_path / "rows.html")]) == 0
    assert "<!doctype html>" in (tmp_path / "rows.html").read_text() and capsys.readouterr().out == ""
    with pytest.raises(SystemExit):
        main([*arguments, "--count", "0"])
    assert main([*arguments[:-2]]) == 1
    assert "a row length" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_ends_the_command_quietly(folder):
    arguments = [
        "rows",
        str(folder / "cats"),
        "--tokenizer",
        str(folder / "tokenizer"),
        "--seq-length",
        "32",
        "--count",
        "100000",
    ]
    command = [sys.executable, str(ROOT / "tools" / "preprocess.py"), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith("row 0 (epoch 0)")
    process.stdout.close()
    assert (process.wait(timeout=120), process.stderr.read()) == (0, "")
    process.stderr.close()
