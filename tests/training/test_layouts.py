"""Every layout gives the loss curve of one process.

Level: fp32 tolerance. Sums run in another order (over tensor ranks, microbatches, ranks), so bits differ. Over six steps of this
model the largest differences seen were 7e-8 in the loss and 2e-7 of the gradient norm; a copy of the embedding table left out of
its group moves them by 1e-2, swapped streams by 4e-2.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_dmtd.config import Config
from tests.support.ranks import run_ranks
from tests.support.tiny import VARIANTS, tiny_config, with_settings

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor-2": (2, {"tensor": 2}),
    "pipeline-2": (2, {"pipeline": 2}),
    "data-2": (2, {}),
}
MORE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "sequence-parallel": (2, {"tensor": 2, "sequence_parallel": True}),
    "pipeline-4": (4, {"pipeline": 4}),
    "pipeline-3-split-in-the-middle": (3, {"pipeline": 3, "stage_layers": (2, 1, 1)}),
    "pipeline-2-tensor-2": (4, {"pipeline": 2, "tensor": 2, "sequence_parallel": True}),
    "no-distributed-optimizer": (2, {"distributed_optimizer": False}),
    "overlapped": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "recompute-full": (1, {"recompute": "full"}),
    "recompute-selective": (1, {"recompute": "selective"}),
}


def curve(config: Config) -> tuple[list[float], list[float], dict[str, float]]:
    """Losses and gradient norms of a run, and its held-out loss. Runs on each rank."""
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training import loop
    from megatron_dmtd.training.step import train_step

    platform = prepare_megatron()
    loop.check(config, world_size=torch.distributed.get_world_size())
    run = loop.prepare(config, platform)
    iterator = loop._iterator(run, loop._dataset(config, config.data.train, shuffled=True), first_row=0)
    results = [train_step(run, iterator) for _ in range(config.training.steps)]
    held_out = loop._evaluate(run, loop._dataset(config, config.data.valid, shuffled=False))
    losses = [result.loss.values()["loss"] for result in results]
    return losses, [result.grad_norm for result in results], held_out.values()


def _config(corpus: tuple[str, str], variant: str, **sections: Any) -> Config:
    return with_settings(tiny_config(variant, **sections), data={"train": (corpus[0],), "valid": (corpus[1],)})


@pytest.fixture(scope="module")
def single(corpus: tuple[str, str]) -> dict[tuple[str, bool], Any]:
    """Curves of one process, by variant and tying."""
    return {
        (variant, tied): run_ranks(1, curve, _config(corpus, variant, model={"tie_word_embeddings": tied}))[0]
        for variant in (*VARIANTS, "vanilla")
        for tied in (True, False)
    }


def _assert_same_curve(found: list[Any], expected: Any) -> None:
    losses, norms, held_out = expected
    assert max(losses) - min(losses) > 0.1, "the curve must move, or the comparison says nothing"
    for rank_losses, rank_norms, rank_held_out in found:
        assert rank_losses == pytest.approx(losses, abs=2e-6)
        assert rank_norms == pytest.approx(norms, rel=5e-6)
        assert rank_held_out == pytest.approx(held_out, abs=2e-6)
        assert set(held_out) == {"loss", *(f"loss_phase_{phase}" for phase in range(4))}


@pytest.mark.multiprocess
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("variant", [*VARIANTS, "vanilla"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_gives_the_curve_of_one_process(
    layout: str, variant: str, tied: bool, corpus: tuple[str, str], single: dict[tuple[str, bool], Any]
) -> None:
    world_size, parallel = LAYOUTS[layout]
    config = _config(corpus, variant, parallel=parallel, model={"tie_word_embeddings": tied})
    _assert_same_curve(run_ranks(world_size, curve, config), single[variant, tied])


@pytest.mark.multiprocess
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("layout", MORE_LAYOUTS)
def test_further_layout_gives_the_curve_of_one_process(
    layout: str, tied: bool, corpus: tuple[str, str], single: dict[tuple[str, bool], Any]
) -> None:
    world_size, parallel = MORE_LAYOUTS[layout]
    config = _config(corpus, "bidirectional-refresh", parallel=parallel, model={"tie_word_embeddings": tied})
    _assert_same_curve(run_ranks(world_size, curve, config), single["bidirectional-refresh", tied])
