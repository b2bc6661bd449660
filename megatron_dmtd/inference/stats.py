"""What an engine counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dmtd.inference.scheduler import Scheduled


@dataclass(slots=True)
class Stats:
    """Counts since the engine was made."""

    num_steps: int = 0
    num_parallel_passes: int = 0
    """Steps that read the parallel layers' weights."""
    num_prompt_tokens: int = 0
    """Tokens computed in chunks of more than one."""
    num_new_tokens: int = 0
    num_preemptions: int = 0
    """Preemptions of requests that are finished."""

    def count_step(self, step: Sequence[Scheduled], *, ran_parallel: bool) -> None:
        """Count one step."""
        self.num_steps += 1
        self.num_parallel_passes += ran_parallel
        sizes = [scheduled.num_tokens for scheduled in step]
        self.num_prompt_tokens += sum(size for size in sizes if size > 1)
