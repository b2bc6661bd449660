"""The learning rate of each step is its closed form, weight decay spares norms and biases, and frozen embeddings do not move."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_dmtd.config import Config
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, with_settings

PEAK, LOW, WARMUP, END = 2e-3, 2e-4, 4, 20


def _close(rates: Any) -> Any:
    return pytest.approx(rates, rel=1e-12, abs=1e-18)


def _rates(config: Config, steps: int) -> list[float]:
    """The learning rate that each of `steps` steps uses."""
    from megatron_dmtd.platform import prepare_megatron

    prepare_megatron()
    from megatron_dmtd.training.setup import _build_scheduler

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    scheduler = _build_scheduler(config, optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=1)
    return rates


def _config(**optimizer: Any) -> Config:
    settings = {"lr": PEAK, "min_lr": LOW, "warmup_steps": WARMUP} | optimizer
    return tiny_config(training={"steps": END}, optimizer=settings)


def _between(share: float) -> float:
    return LOW + (PEAK - LOW) * share


DECAYS = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "exponential": lambda done: 2 * 0.5**done - 1,
    "minus_sqrt": lambda done: 1 - math.sqrt(done),
}


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_a_decay_follows_a_linear_warm_up_from_zero_and_ends_at_the_lowest_rate(decay: str) -> None:
    rates = _rates(_config(decay=decay), END + 5)
    assert rates[:WARMUP] == _close([0.0, PEAK / 4, PEAK / 2, PEAK * 3 / 4])
    expected = [_between(DECAYS[decay]((step - WARMUP) / (END - WARMUP))) for step in range(WARMUP, END + 1)]
    assert rates[WARMUP : END + 1] == _close(expected)
    assert rates[END:] == _close([LOW] * 5)


def test_a_constant_rate_stays_at_the_peak() -> None:
    rates = _rates(_config(decay="constant"), END + 5)
    assert rates[WARMUP:] == [PEAK] * (END + 5 - WARMUP) and rates[1] == _close(PEAK / 4)


@pytest.mark.parametrize("style", list(DECAYS))
def test_wsd_is_stable_between_warm_up_and_its_final_decay(style: str) -> None:
    rates = _rates(_config(decay="WSD", wsd_decay_steps=6, wsd_decay_style=style), END + 5)
    assert rates[WARMUP:15] == [PEAK] * 11
    assert rates[14 : END + 1] == _close([_between(DECAYS[style](step / 6)) for step in range(7)])
    assert rates[END:] == _close([LOW] * 5)


def test_a_decay_may_end_before_training_and_needs_no_warm_up() -> None:
    rates = _rates(_config(decay="linear", decay_steps=10, warmup_steps=0), END)
    assert rates[:11] == _close([_between(1 - step / 10) for step in range(11)])
    assert rates[10:] == _close([LOW] * 10)


def _decayed(config: Config) -> tuple[dict[str, float], list[float]]:
    """Weight decay by parameter, and that of each group."""
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training import start

    run = start.prepare(config, prepare_megatron())
    of = {id(p): group["weight_decay"] for group in run.optimizer.param_groups for p in group["params"]}
    named = {name: of[id(parameter)] for name, parameter in run.model.named_parameters()}
    return named, [group["weight_decay"] for group in run.optimizer.param_groups]


@pytest.mark.multiprocess
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_weight_decay_falls_on_matrices_and_spares_norms(tied: bool) -> None:
    config = tiny_config(
        model={"tie_word_embeddings": tied}, optimizer={"weight_decay": 0.3}, parallel={"distributed_optimizer": False}
    )
    ((named, _),) = run_ranks(1, _decayed, config)
    spared = {name for name, decay in named.items() if decay == 0}
    assert set(named.values()) == {0.0, 0.3}
    assert spared == {name for name in named if "norm" in name}
    assert len(spared) == 4 * 4 + 1, "two norms of each layer, two of its heads, and the last"
    assert len(named) - len(spared) == 4 * 4 + (1 if tied else 2)


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
