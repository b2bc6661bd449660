"""The settings of `data` as training reads them: packing, blending, the cache, reading ahead, and the tokenizer's identity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dmtd.config import Config
from megatron_dmtd.data.batches.blending import BlendedDataset
from megatron_dmtd.data.batches.dataset import PackedDataset
from megatron_dmtd.data.corpora.tokenizer import tokenizer_sha256, train_bpe
from megatron_dmtd.errors import ConfigError, DataError
from megatron_dmtd.training import start
from megatron_dmtd.training.rows import open_corpora, with_bos
from tests.support.jobs import lines_of, run_job
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, with_settings, write_corpus


@pytest.fixture
def corpora(tmp_path: Path) -> tuple[str, str]:
    """Two small corpora of one folder."""
    return (
        write_corpus(tmp_path / "a", num_documents=20, seed=1),
        write_corpus(tmp_path / "b", num_documents=30, seed=2),
    )


def _config(corpora: tuple[str, ...], **data: Any) -> Config:
    return tiny_config(data={"train": corpora, **data})


def test_the_settings_reach_the_rows(corpora: tuple[str, str], tmp_path: Path) -> None:
    plain = open_corpora(_config(corpora)).train
    assert isinstance(plain, PackedDataset)
    fitted = open_corpora(_config(corpora, packing="best-fit", cache_dir=str(tmp_path / "elsewhere"))).train
    assert "0.00 % of the documents are cut" not in plain.report()
    assert len(list((tmp_path / "index-cache").glob("*/meta.json"))) == 1
    assert len(list((tmp_path / "elsewhere").glob("*/meta.json"))) == 1
    assert fitted.rows_per_epoch >= plain.rows_per_epoch
    blended = open_corpora(_config(corpora, train_weights=(3.0, 1.0))).train
    assert isinstance(blended, BlendedDataset)
    rows = [blended[index].tokens_N for index in range(40)]
    from_first = [row for row in rows if any(np.array_equal(row, blended.datasets[0][i].tokens_N) for i in range(30))]
    assert len(from_first) == 30


def test_a_corpus_of_another_tokenizer_is_refused_before_training(corpora: tuple[str, str], tmp_path: Path) -> None:
    train_bpe(["the cat"], vocab_size=259, output_dir=tmp_path / "tokenizer")
    manifest = {"num_documents": 20, "num_tokens": 1, "dtype": "uint16", "max_token_id": 98, "vocab_size": 100}
    manifest |= {"eos_token_id": 0, "pad_token_id": 0, "mask_token_id": 99, "source": "", "split": "all", "heldout_fraction": 0.0}
    path = Path(corpora[0] + ".json")
    config = with_settings(_config(corpora, tokenizer=str(tmp_path / "tokenizer")), cycle={"variant": "vanilla"})
    start.check(config, world_size=1)  # no manifest: nothing can be told
    path.write_text(json.dumps({**manifest, "tokenizer_sha256": tokenizer_sha256(tmp_path / "tokenizer")}))
    start.check(config, world_size=1)
    path.write_text(json.dumps({**manifest, "tokenizer_sha256": "ab"}))
    with pytest.raises(DataError, match="the tokenizer that made"):
        start.check(config, world_size=1)


def test_corpora_that_begin_documents_differently_are_refused_and_the_answer_is_kept(corpora: tuple[str, str]) -> None:
    manifest = {"num_documents": 20, "num_tokens": 1, "dtype": "uint16", "max_token_id": 98, "vocab_size": 100}
    manifest |= {"eos_token_id": 0, "pad_token_id": 0, "mask_token_id": 99, "source": "", "split": "all", "heldout_fraction": 0.0}
    manifest |= {"tokenizer_sha256": ""}
    first, second = (Path(prefix + ".json") for prefix in corpora)
    first.write_text(json.dumps({**manifest, "add_bos": "yes", "bos_token_id": 5}))
    assert with_bos(_config(corpora)).data.add_bos == "yes", "the second has no manifest"
    assert with_bos(_config(corpora[1:])).data.add_bos == "auto"
    with pytest.raises(ConfigError, match=r"data\.add_bos = no, and corpora made with --add-bos yes"):
        start.check(_config(corpora, add_bos="no"), world_size=1)
    second.write_text(json.dumps(manifest))
    for config in (_config(corpora), _config(corpora[:1], valid=corpora[1:])):
        with pytest.raises(ConfigError, match=r"with BOS 5 before each document; .* without BOS"):
            start.check(config, world_size=1)


def test_a_mask_that_is_an_ordinary_token_is_refused_before_training(corpora: tuple[str, str], tmp_path: Path) -> None:
    train_bpe(["the cat"], vocab_size=259, output_dir=tmp_path / "tokenizer")
    config = _config(corpora, tokenizer=str(tmp_path / "tokenizer"))
    assert config.cycle.mask_token_id == 99
    with pytest.raises(DataError, match="mask_token_id = 99, the ordinary token"):
        start.check(config, world_size=1)
    start.check(with_settings(config, cycle={"variant": "vanilla"}), world_size=1)
    beyond = {"model": {"vocab_size": 400}, "cycle": {"mask_token_id": 300}}
    start.check(with_settings(config, **beyond), world_size=1)


@pytest.mark.multiprocess
def test_a_blended_best_fit_run_is_the_same_on_any_number_of_ranks_and_with_or_without_reading_ahead(
    corpora: tuple[str, str], tmp_path: Path
) -> None:
    losses = []
    for ranks, depth in ((1, 0), (2, 2)):
        config = tiny_config(
            data={"train": corpora, "train_weights": (0.3, 0.7), "packing": "best-fit", "prefetch_batches": depth},
            training={"steps": 3},
            logging={"dir": str(tmp_path / f"log{ranks}")},
        )
        assert [ended for ended, _, _ in run_ranks(ranks, run_job, config)] == ["done"] * ranks
        losses.append([line["loss"] for line in lines_of(config)])
    assert len(losses[0]) == 3
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
