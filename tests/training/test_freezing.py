"""Frozen embeddings stay as they were, in every place that holds them; everything else is trained as without recompute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_dmtd.config import Config
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, with_settings


def before_and_after(config: Config) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Weights of this rank's stages before and after training, by their names in the whole model."""
    from megatron_dmtd.models.initialization import global_name
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training import rows, start
    from megatron_dmtd.training.step import train_step

    run = start.prepare(config, prepare_megatron())

    def weights() -> list[dict[str, torch.Tensor]]:
        return [
            {global_name(name, model): parameter.detach().clone() for name, parameter in model.named_parameters()}
            for model in run.models
        ]

    before = weights()
    iterator = rows.microbatches(run, rows.open_corpus(config, config.data.train), first_row=0)
    for _ in range(3):
        train_step(run, iterator)
    return list(zip(before, weights(), strict=True))


@pytest.mark.multiprocess
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        (1, {}),
        (1, {"recompute": "full"}),
        (2, {"pipeline": 2}),
        (3, {"pipeline": 3, "stage_layers": (2, 1, 1)}),
        (2, {"tensor": 2}),
    ],
    ids=["one", "recompute", "pipeline-2", "pipeline-3", "tensor-2"],
)
def test_frozen_embeddings_do_not_move_and_all_layers_do(
    world_size: int, parallel: dict[str, Any], tied: bool, corpus: tuple[str, str]
) -> None:
    config = tiny_config(parallel=parallel, model={"tie_word_embeddings": tied}, training={"freeze_embeddings": True})
    config = with_settings(config, data={"train": (corpus[0],)})
    moved, still = set(), set()
    for rank in run_ranks(world_size, before_and_after, config):
        for before, after in rank:
            for name, tensor in before.items():
                (still if torch.equal(tensor, after[name]) else moved).add(name)
    assert still == {"embedding.word_embeddings.weight"} | (set() if tied else {"output_layer.weight"})
    assert {f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in range(4)} <= moved


@pytest.mark.multiprocess
def test_recompute_trains_the_same_weights_under_frozen_embeddings(corpus: tuple[str, str]) -> None:
    config = with_settings(tiny_config(training={"freeze_embeddings": True}), data={"train": (corpus[0],)})
    plain = run_ranks(1, before_and_after, config)[0][0][1]
    recomputed = run_ranks(1, before_and_after, with_settings(config, parallel={"recompute": "full"}))[0][0][1]
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)
