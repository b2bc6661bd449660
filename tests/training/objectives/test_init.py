"""A second objective, with rows, a loss, a log and a memory of its own, trains through the loop and the step as they are.

It weighs each target, by a weight that comes with its row, and by a scale that it remembers over a restart.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import megatron_dmtd.training as package
from megatron_dmtd.config import Config
from megatron_dmtd.data.batches.batch import Batch
from megatron_dmtd.data.batches.dataset import PackedDataset
from megatron_dmtd.data.batches.loader import collate
from megatron_dmtd.data.batches.rows import Row
from megatron_dmtd.errors import CheckpointError, ConfigError
from megatron_dmtd.training.objectives import OBJECTIVES, MicrobatchLoss, make_objective
from tests.support.checkpoints import common_of
from tests.support.jobs import lines_of
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, with_settings


@dataclass(frozen=True, kw_only=True, slots=True)
class WeighedRow(Row):
    weight_N: npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class WeighedBatch:
    packed: Batch
    weight_BN: torch.Tensor

    def to(self, device: torch.device) -> WeighedBatch:
        return WeighedBatch(packed=self.packed.to(device), weight_BN=self.weight_BN.to(device))


class WeighedSums:
    """Weighted loss, targets, weights."""

    def __init__(self) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64)

    @property
    def num_targets(self) -> int:
        return int(self.sums[1])

    def values(self, *, prefix: str = "") -> dict[str, float]:
        loss, targets, weights = self.sums.tolist()
        return {f"{prefix}loss": loss / targets, f"{prefix}mean_weight": weights / targets} if targets else {}


class Weighed:
    """The scale of a new run is 2; a resumed one has that of its checkpoint."""

    row_type = WeighedRow

    def __init__(self, config: Config) -> None:
        self.scale = 2.0

    def make_batch(self, rows: Sequence[WeighedRow]) -> WeighedBatch:
        return WeighedBatch(packed=collate(rows), weight_BN=torch.from_numpy(np.stack([row.weight_N for row in rows])))

    def forward(self, model: Any, batch: WeighedBatch) -> torch.Tensor:
        packed = batch.packed
        return model(packed.tokens_BN, packed.positions_BN, packed.labels_BN, document_lengths=packed.document_lengths)  # type: ignore[no-any-return]

    def loss(self, batch: WeighedBatch, output: torch.Tensor) -> MicrobatchLoss:
        weight_BN = self.scale * batch.weight_BN * batch.packed.loss_mask_BN
        count, total = batch.packed.loss_mask_BN.sum(), (output.float() * weight_BN).sum()
        sums = self.new_sums(device=output.device)
        sums.sums += torch.stack([total.detach(), count, weight_BN.sum()]).double()
        return MicrobatchLoss(loss=total, count=count.to(torch.int), sums=sums)

    def new_sums(self, *, device: torch.device | str) -> WeighedSums:
        return WeighedSums()

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale + 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale = state["scale"]


class WeighedRows:
    """The rows of a corpus, each target with the weight `weight`; no epochs."""

    rows_per_epoch, targets_per_epoch = 0, 0

    def __init__(self, corpus: PackedDataset, weight: float) -> None:
        self.corpus, self.weight = corpus, weight

    def __getitem__(self, index: int) -> WeighedRow:
        row = self.corpus[index]
        weight_N = np.full(len(row.tokens_N), self.weight, dtype=np.float32)
        return WeighedRow(**{name: getattr(row, name) for name in Row.__slots__}, weight_N=weight_N)

    def padding_row(self) -> WeighedRow:
        raise AssertionError("nothing is held out")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBJECTIVES, "weighed", Weighed)


def _train(config: Config, weight: float | None) -> dict[str, float]:
    """A whole run, with weighed rows or, without a `weight`, those of the configuration."""
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training.loop import run_training
    from megatron_dmtd.training.rows import Sources, open_corpora, open_corpus

    def weighed(config: Config) -> Sources:
        assert weight is not None
        return Sources(train=WeighedRows(open_corpus(config, config.data.train), weight), valid=None)

    return run_training(config, prepare_megatron(), open_sources=open_corpora if weight is None else weighed)


def _config(corpus: tuple[str, str], folder: Path, objective: str, **sections: Any) -> Config:
    folders = {"checkpoint": {"dir": str(folder / "checkpoints")}, "logging": {"dir": str(folder / "log")}}
    training = {"objective": objective, "steps": 2} | sections.pop("training", {})
    return with_settings(
        tiny_config(training=training, **sections), data={"train": (corpus[0],)}, **folders, optimizer={"warmup_steps": 0}
    )


@pytest.mark.multiprocess
@pytest.mark.parametrize("parallel", [{}, {"pipeline": 2}], ids=["data", "pipeline"])
def test_a_second_objective_trains_logs_and_remembers(parallel: dict[str, Any], corpus: tuple[str, str], tmp_path: Path) -> None:
    plain = _config(corpus, tmp_path / "plain", "next_token", parallel=parallel)
    run_ranks(2, _train, plain, None)
    weighed = _config(corpus, tmp_path / "weighed", "weighed", parallel=parallel)
    run_ranks(2, _train, weighed, 0.5)
    # Half the weight, twice the scale: the same loss and gradient.
    for ours, theirs in zip(lines_of(weighed), lines_of(plain), strict=True):
        assert (ours["loss"], ours["grad_norm"]) == pytest.approx((theirs["loss"], theirs["grad_norm"]), rel=1e-6)
        assert ours["mean_weight"] == 1.0
        assert "loss_phase_0" in theirs and "loss_phase_0" not in ours
    assert common_of(tmp_path / "weighed" / "checkpoints" / "step_00000002")["objective"] == {"scale": 3.0}
    run_ranks(2, _train, with_settings(weighed, training={"steps": 3}), 0.5)
    assert lines_of(weighed)[-1]["step"] == 3 and lines_of(weighed)[-1]["mean_weight"] == 1.5


def _refusal(config: Config, weight: float | None) -> str:
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        _train(config, weight)
    return str(caught.value)


@pytest.mark.multiprocess
def test_rows_of_another_type_are_refused_by_name(corpus: tuple[str, str], tmp_path: Path) -> None:
    (refusal,) = run_ranks(1, _refusal, _config(corpus, tmp_path, "weighed"), None)
    assert "rows of type Row for training.objective = weighed\nrequired: rows of type WeighedRow" in refusal


@pytest.mark.multiprocess
def test_a_run_does_not_go_on_with_another_objective(corpus: tuple[str, str], tmp_path: Path) -> None:
    run_ranks(1, _train, _config(corpus, tmp_path, "next_token", training={"steps": 1}), None)
    (refusal,) = run_ranks(1, _refusal, _config(corpus, tmp_path, "weighed"), 1.0)
    assert "training.objective = next_token in the checkpoint, weighed in this run (another objective" in refusal


def test_an_unknown_objective_is_refused_with_the_closest_name() -> None:
    with pytest.raises(
        ConfigError, match=r"'next-token'\nrequired: one of next_token, weighed\nremedy: did you mean next_token\?"
    ):
        make_objective(tiny_config(training={"objective": "next-token"}))


def test_loop_step_and_state_name_no_objective() -> None:
    folder = Path(str(package.__file__)).parent
    modules = [folder / f"{name}.py" for name in ("loop", "step", "state", "rows", "progress", "start", "setup")]
    for path in [*modules, *(folder / "checkpoints").glob("*.py"), *(folder / "health").glob("*.py")]:
        imports = {n.module for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)}
        assert not imports & {"megatron_dmtd.training.objectives.next_token", "megatron_dmtd.training.metrics"}, path
