"""Engines that say what a script says, so that a test decides which tokens come."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_dmtd.inference import Engine


def scripted(engine: Engine, script: Sequence[int], *, prompt_length: int) -> Engine:
    """Let the engine's model want the tokens of `script` one after the other, whatever it computes."""
    run = engine.runner.run

    def run_as_written(plan, wanted) -> torch.Tensor:
        logits_FV = run(plan, wanted).clone()
        for row, logits_V in zip(wanted, logits_FV):
            number = plan.sequential.position[row] + 1 - prompt_length
            if 0 <= number < len(script):
                logits_V.fill_(-10.0)
                logits_V[script[number]] = 10.0
        return logits_FV

    engine.runner.run = run_as_written
    return engine
