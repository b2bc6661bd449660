"""A running engine takes the weights of a running training, whatever its layout, and then is a fresh engine on its export."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dmtd.config import Config
from megatron_dmtd.conversion.convert import export_hf
from megatron_dmtd.inference import Engine, EngineConfig, score
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, with_settings, write_corpus

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "tensor 2": (2, {"tensor": 2}),
    "pipeline 2": (2, {"pipeline": 2}),
    "data 2, overlapped": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
}
PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]
SMALL = EngineConfig(max_batch=2, max_length=64, cache_tokens=256)


def weights_before_and_after(config: Config) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The streams after two steps and after four, and a checkpoint of the latter."""
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training import live, loop
    from megatron_dmtd.training.health.signals import StopSignals

    found: list[dict[str, torch.Tensor]] = []
    real = loop.train_step

    def step(run: Any, *arguments: Any, **options: Any) -> Any:
        result = real(run, *arguments, **options)
        if run.step in (2, 4):
            found.append({name: tensor.clone() for name, tensor in live.live_weights(run)})
        return result

    loop.train_step = step
    loop.run_training(config, prepare_megatron(), StopSignals())
    before, after = found
    return before, after


@pytest.mark.multiprocess
@pytest.mark.parametrize("variant", ["bidirectional-refresh", "vanilla"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_engine_follows_a_training(tmp_path: Path, layout: str, variant: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    config = tiny_config(
        variant,
        data={"train": (write_corpus(tmp_path / "corpus", num_documents=20),)},
        training={"steps": 4},
        checkpoint={"dir": str(tmp_path / "run"), "asynchronous": False, "interval": 2},
        parallel=parallel,
    )
    streams = run_ranks(ranks, weights_before_and_after, with_settings(config, optimizer={"warmup_steps": 0}))
    for before, after in streams[1:]:  # every rank sees the same
        assert all(torch.equal(before[name], streams[0][0][name]) for name in before)
        assert all(torch.equal(after[name], streams[0][1][name]) for name in after)
    before, after = streams[0]
    export_hf(tmp_path / "run" / "step_00000002", tmp_path / "second")
    export_hf(tmp_path / "run" / "step_00000004", tmp_path / "fourth")
    engine, fresh = (Engine(tmp_path / name, SMALL, device="cpu") for name in ("second", "fourth"))
    held = {name: tensor.clone() for name, tensor in stored_tensors(tmp_path / "fourth").items()}
    assert held.keys() == after.keys() and all(torch.equal(held[name], after[name]) for name in held)
    scores = score(engine, PROMPTS[0])
    engine.update_weights(before)
    assert score(engine, PROMPTS[0]) == pytest.approx(scores, abs=1e-6), "it had these weights already"
    engine.update_weights(iter(after.items()))
    assert score(engine, PROMPTS[0]) != pytest.approx(scores, abs=1e-6)
    assert score(engine, PROMPTS[0]) == pytest.approx(score(fresh, PROMPTS[0]), abs=1e-6)
    found, expected = (one.generate(PROMPTS, max_new_tokens=12) for one in (engine, fresh))
    assert [completion.token_ids for completion in found] == [completion.token_ids for completion in expected]


def stored_tensors(directory: Path) -> dict[str, torch.Tensor]:
    from megatron_dmtd.weights.streams import stream_directory

    return dict(stream_directory(directory))
