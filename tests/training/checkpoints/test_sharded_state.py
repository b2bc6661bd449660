"""A run's state as Megatron stores it, put into another run of one rank. Files and layouts: `test_checkpoint.py`."""

from typing import Any

import pytest
import torch

from megatron_dmtd.config import Config
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, with_settings

pytestmark = pytest.mark.multiprocess


def _run(config: Config, *, steps: int) -> tuple[Any, Any]:
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training import rows, start
    from megatron_dmtd.training.progress import Progress
    from megatron_dmtd.training.step import train_step

    run = start.prepare(config, prepare_megatron())
    iterator = rows.microbatches(run, rows.open_corpus(config, config.data.train), first_row=run.rows)
    for _ in range(steps):
        train_step(run, iterator)
    return run, Progress.new(run.objective)


def _state_of_a_new_run(config: Config) -> dict[str, Any]:
    from megatron_dmtd.training.checkpoints.sharded_state import METADATA, model_state, whole_state

    run, progress = _run(config, steps=0)
    (part,) = run.optimizer.chained_optimizers
    before = len(part.optimizer.state)
    state = whole_state(run, progress, is_loading=False, with_random_state=True)
    moments = list(part.optimizer.state.values())
    weights = model_state(run)
    return {
        "keys": sorted(state),
        "progress": {name: state["progress"][name] for name in ("step", "rows", "bad_steps")},
        "moments": (before, len(moments), max(float(moment["exp_avg"].abs().max()) for moment in moments)),
        "without": "random_state" in whole_state(run, progress, is_loading=False, with_random_state=False),
        "weights": (list(weights), len(weights["model0"]) > 10),
        "metadata": METADATA["distrib_optim_sharding_type"],
    }


def test_a_run_that_has_made_no_step_has_all_that_a_checkpoint_holds(corpus: tuple[str, str]) -> None:
    config = with_settings(tiny_config(), data={"train": (corpus[0],)})
    found = run_ranks(1, _state_of_a_new_run, config)[0]
    assert found["keys"] == ["model", "objective", "optimizer", "progress", "random_state", "scheduler"]
    assert found["progress"] == {"step": 0, "rows": 0, "bad_steps": 0}
    before, number, largest = found["moments"]
    assert before == 0 and number > 0 and largest == 0.0
    assert not found["without"] and found["weights"] == (["model0"], True) and found["metadata"] == "fully_reshardable"


def _restored(config: Config) -> dict[str, Any]:
    """A plain state, as loading gives it, put back into a run that has changed."""
    from megatron_dmtd.training.checkpoints.sharded_state import restore

    run, progress = _run(config, steps=1)
    progress.recent_losses = [4.5]
    state = {
        "model": {"model0": {name: tensor.clone() for name, tensor in run.model.state_dict().items() if tensor is not None}},
        "optimizer": run.optimizer.state_dict(),
        "scheduler": run.scheduler.state_dict(),
        "progress": {"step": run.step, "rows": run.rows} | progress.to_dict(),
    }
    weights = [parameter.detach().clone() for parameter in run.model.parameters()]
    random = torch.get_rng_state()
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(1.0)
    run.step, run.rows, run.scheduler.num_steps = 9, 99, 0  # Megatron's scheduler counts on from where it is
    torch.rand(3)
    moved = torch.get_rng_state()
    after = restore(run, state)  # a checkpoint of another layout and an earlier version: no random state, no objective
    return {
        "weights": all(torch.equal(one, other) for one, other in zip(weights, run.model.parameters())),
        "counts": (run.step, run.rows, after.recent_losses),
        "random": (torch.equal(torch.get_rng_state(), moved), torch.equal(moved, random)),
        "lr": run.scheduler.num_steps,
    }


def test_what_is_restored_is_what_was_saved_and_what_is_absent_stays_as_it_is(corpus: tuple[str, str]) -> None:
    config = with_settings(tiny_config(parallel={"distributed_optimizer": False}), data={"train": (corpus[0],)})
    found = run_ranks(1, _restored, config)[0]
    assert found == {"weights": True, "counts": (1, 4, [4.5]), "random": (True, False), "lr": 1}
