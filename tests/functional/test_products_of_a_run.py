"""What multiplies in a training run: oneDNN gives the curve of torch, a resumed run keeps its choices, bf16 the curve of fp32.

Levels, over ten steps of a tiny model: oneDNN 1e-5 in the loss (at these sizes both libraries gave the same bits on an AVX-512
machine), bitwise between a run and the same run resumed, bf16 0.005 in a loss that falls by 0.24 (0.001 seen).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_dmtd.config import Config
from megatron_dmtd.platform import choices, products
from megatron_dmtd.training import start
from tests.platform.test_products import all_take
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, with_settings
from tests.training.test_layouts import curve

STEPS = 10


def curve_by(name: str, config: Config) -> tuple[list[float], int]:
    """Losses with every product by one library, and how often that multiplied."""
    calls, original = [], products.PRODUCTS[name]
    products.PRODUCTS[name] = lambda *operands: calls.append(1) or original(*operands)  # type: ignore[func-returns-value]
    products.SMALL = 0
    products.choices_of_this_machine = lambda: all_take(name)
    return curve(config)[0], len(calls)


def curve_by_choice(config: Config, steps: int, cache: str) -> tuple[list[float], list[choices.Choice]]:
    """Losses from wherever the run stands to `steps`, with a cache of its own."""
    import os

    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training.loop import run_training

    os.environ["XDG_CACHE_HOME"] = cache
    products.SMALL, choices.WIDTH = 0, 32
    run_training(with_settings(config, training={"steps": steps}), prepare_megatron())
    return [], list(products.choices_of_this_machine().all)


@pytest.fixture(scope="module")
def tiny(corpus: tuple[str, str]) -> Config:
    config = tiny_config("bidirectional-refresh", training={"steps": STEPS}, optimizer={"decay_steps": STEPS})
    return with_settings(config, data={"train": (corpus[0],), "valid": (corpus[1],)})


def test_both_libraries_give_the_same_curve(tiny: Config) -> None:
    (by_torch, torch_calls), (by_onednn, onednn_calls) = (run_ranks(1, curve_by, name, tiny)[0] for name in ("torch", "onednn"))
    # four layers of four matrices and the head, three products each but for what ends at a visit, four rows a step
    assert torch_calls == onednn_calls > 10 * 4 * 40
    assert by_onednn == pytest.approx(by_torch, abs=1e-5) and by_torch[0] - by_torch[-1] > 0.1


@pytest.mark.parametrize("name", ["torch", "onednn", "widened"])
def test_bf16_gives_the_curve_of_fp32(tiny: Config, name: str) -> None:
    if name == "onednn" and name not in products.candidates(torch.bfloat16):
        pytest.skip("oneDNN does not multiply bf16 on this processor")
    in_fp32, _ = run_ranks(1, curve_by, "torch", tiny)[0]
    in_bf16, _ = run_ranks(1, curve_by, name, with_settings(tiny, training={"precision": "bf16"}))[0]
    assert in_bf16 != in_fp32 and in_bf16 == pytest.approx(in_fp32, abs=0.005)


def test_a_resumed_run_keeps_its_choices_when_the_cache_is_lost(tiny: Config, tmp_path: Path) -> None:
    runs = [
        with_settings(
            tiny, checkpoint={"dir": str(tmp_path / name), "interval": 2}, logging={"dir": str(tmp_path / name / "log")}
        )
        for name in ("whole", "cut")
    ]
    caches = [str(tmp_path / f"cache-{index}") for index in range(3)]
    run_ranks(1, curve_by_choice, runs[0], 4, caches[0])
    run_ranks(1, curve_by_choice, runs[1], 2, caches[0])
    copies = [list((tmp_path / name / start.PRODUCTS_FOLDER).glob("*.json")) for name in ("whole", "cut")]
    assert [len(found) for found in copies] == [1, 1] and copies[0][0].read_text() == copies[1][0].read_text()
    (chosen,) = {str(run_ranks(1, curve_by_choice, runs[1], 4, caches[1])[0][1])}
    assert chosen == str(list(choices.recorded(copies[1][0]).all))  # type: ignore[union-attr]
    assert not Path(caches[1], "megatron_dmtd", "products").exists(), "measured again"
    logs = [[json.loads(line) for line in Path(run.logging.dir, "metrics.jsonl").read_text().splitlines()] for run in runs]
    losses = [[(one["step"], one["loss"], one["grad_norm"]) for one in log if "grad_norm" in one] for log in logs]
    assert len(losses[0]) == 4 and losses[0] == losses[1]
