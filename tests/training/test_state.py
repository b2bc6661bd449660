from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core import parallel_state

from megatron_dmtd.training.state import RunState
from tests.support.tiny import tiny_config


class Stage:
    """Stands for a model: what it was asked for, and what it took."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.taken: Any = None

    def sharded_state_dict(self, *, metadata: dict[str, Any]) -> dict[str, Any]:
        metadata["touched"] = True
        return {"weights of": self.name}

    def load_state_dict(self, state: Any) -> None:
        self.taken = state


def run_of(*stages: Stage, **training: Any) -> RunState:
    nothing: Any = SimpleNamespace()
    return RunState(
        config=tiny_config(training=training),
        platform=nothing,
        placement=nothing,
        objective=nothing,
        models=list(stages),  # type: ignore[arg-type]
        wrapped=[],
        optimizer=None,
        scheduler=nothing,
    )


def test_a_rank_without_virtual_stages_has_one_model():
    stage = Stage("a")
    assert run_of(stage).model is stage
    with pytest.raises(AssertionError, match="2 stages on one rank"):
        _ = run_of(stage, Stage("b")).model


def test_the_next_steps_rows_follow_from_the_rows_consumed():
    run = run_of(global_batch_size=8, rampup_batch_size=(4, 4, 16))
    assert (run.rows, run.batch_size) == (0, 4)
    run.rows = 16
    assert run.batch_size == 8


def test_microbatches_are_shared_by_data_parallel_ranks(monkeypatch):
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 3)
    run = run_of(micro_batch_size=2, global_batch_size=12)
    assert (run.num_microbatches(12), run.num_microbatches(6)) == (2, 1)
    with pytest.raises(AssertionError):
        run.num_microbatches(8)


def test_each_stage_is_stored_and_restored_under_its_own_key():
    first, second = Stage("a"), Stage("b")
    run, metadata = run_of(first, second), {"kind": "x"}
    state = run.sharded_model_state(metadata)
    assert state == {"model0": {"weights of": "a"}, "model1": {"weights of": "b"}}
    assert metadata == {"kind": "x"}, "Megatron changes what it is given"
    run.load_model_state(state)
    assert (first.taken, second.taken) == ({"weights of": "a"}, {"weights of": "b"})
