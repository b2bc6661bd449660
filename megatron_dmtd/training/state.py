"""The state of a run, as one value: what steps change, checkpoints save and everything else reads.

The lowest module of training: `setup.py` builds the value, the others take it, and it knows none of them. It knows what the run
minimises only through the protocol of objectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_dmtd.config import Config, batch_size
from megatron_dmtd.models.model import CycleModel
from megatron_dmtd.parallel.placement import Placement
from megatron_dmtd.platform import Platform
from megatron_dmtd.training.objectives.protocol import Objective


@dataclass(kw_only=True, slots=True)
class RunState:
    """One rank of a run: its parts, and how far it has come."""

    config: Config
    platform: Platform
    placement: Placement
    objective: Objective[Any]
    models: list[CycleModel]
    """This rank's stages, unwrapped: one, or several with virtual stages."""
    wrapped: list[DistributedDataParallel]
    """The same, as the schedules call them."""
    optimizer: Any
    scheduler: OptimizerParamScheduler
    step: int = 0
    """Finished optimizer steps."""
    rows: int = 0
    """Rows of training data consumed, over all ranks."""

    @property
    def model(self) -> CycleModel:
        """The only stage of a rank without virtual stages."""
        assert len(self.models) == 1, f"{len(self.models)} stages on one rank"
        return self.models[0]

    @property
    def batch_size(self) -> int:
        """Rows of the next step, over all ranks."""
        return batch_size(self.config.training, self.rows)

    def num_microbatches(self, num_rows: int) -> int:
        """Forward passes per rank for a global batch of so many rows."""
        rows = self.config.training.micro_batch_size * parallel_state.get_data_parallel_world_size()
        assert num_rows % rows == 0, (num_rows, rows)
        return num_rows // rows

    def sharded_model_state(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Megatron's sharded state of all stages. The keys only tell stages apart; tensors are stored under global names."""
        return {f"model{index}": model.sharded_state_dict(metadata=dict(metadata)) for index, model in enumerate(self.models)}

    def load_model_state(self, state: dict[str, Any]) -> None:
        """Take the weights out of a loaded `sharded_model_state`."""
        for index, model in enumerate(self.models):
            model.load_state_dict(state[f"model{index}"])
