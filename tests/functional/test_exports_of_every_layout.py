"""A run saved in any layout exports to the same bytes, file by file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_dmtd.config import Config
from megatron_dmtd.conversion.convert import export_hf
from tests.support.hf_models import save_tokenizer
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, with_settings

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor-2": (2, {"tensor": 2}),
    "sequence-parallel": (2, {"tensor": 2, "sequence_parallel": True}),
    "pipeline-2": (2, {"pipeline": 2}),
    "pipeline-3-uneven": (3, {"pipeline": 3, "stage_layers": (2, 1, 1)}),
    "virtual-stages": (2, {"pipeline": 2, "virtual_stages": 2}),
    "data-2": (2, {}),
    "pipeline-2-tensor-2": (4, {"pipeline": 2, "tensor": 2}),
}


def train_and_save(config: Config, steps: int, target: str) -> int:
    """Resume, if there is something to resume from, train to `steps`, and save elsewhere. The first step; runs on each rank."""
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training import rows, start
    from megatron_dmtd.training.checkpoints.checkpoint import save_checkpoint
    from megatron_dmtd.training.step import train_step

    run = start.prepare(config, prepare_megatron())
    first = run.step
    iterator = rows.microbatches(run, rows.open_corpus(config, config.data.train), first_row=run.rows)
    for _ in range(steps - first):
        train_step(run, iterator)
    save_checkpoint(run, target)
    return first


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.mark.multiprocess
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_layout_exports_the_same_bytes(tied: bool, corpus: tuple[str, str], tmp_path: Path) -> None:
    """The vocabulary of 300 is padded to 384 rows, 192 on each of two tensor-parallel ranks."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer", vocab_size=280)
    config = with_settings(
        tiny_config("causal-refresh"),
        model={"tie_word_embeddings": tied, "vocab_size": 300},
        cycle={"mask_token_id": 299},
        data={"train": (corpus[0],), "tokenizer": str(tokenizer)},
    )
    run_ranks(1, train_and_save, config, 2, str(tmp_path / "one"))
    export_hf(tmp_path / "one", tmp_path / "one-out")
    expected = contents(tmp_path / "one-out")
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "dmtd_cycles.py"} <= expected.keys()
    for name, (world_size, parallel) in LAYOUTS.items():
        resumed = with_settings(config, parallel=parallel, checkpoint={"dir": str(tmp_path / "one")})
        firsts = run_ranks(world_size, train_and_save, resumed, 2, str(tmp_path / name))
        assert firsts == [2] * world_size
        export_hf(tmp_path / name, tmp_path / f"{name}-out")
        found = contents(tmp_path / f"{name}-out")
        assert found == expected, (name, [file for file in expected if found.get(file) != expected[file]])
