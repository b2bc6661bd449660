"""What a run minimises. A new objective is a file here and a line in `OBJECTIVES`; loop and step only know the protocol."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from megatron_dmtd.config import Config
from megatron_dmtd.errors import ConfigError
from megatron_dmtd.training.objectives.next_token import NextToken
from megatron_dmtd.training.objectives.protocol import LossSums, Microbatch, MicrobatchLoss, Objective

#: by the name in `training.objective`
OBJECTIVES: dict[str, Callable[[Config], Objective[Any]]] = {"next_token": NextToken}


def make_objective(config: Config) -> Objective[Any]:
    """The objective that `training.objective` names. Raises `ConfigError` if there is no such one."""
    name = config.training.objective
    if name not in OBJECTIVES:
        close = difflib.get_close_matches(name, OBJECTIVES, n=1, cutoff=0.5)
        raise ConfigError(
            found=f"training.objective = {name!r}",
            required="one of " + ", ".join(sorted(OBJECTIVES)),
            remedy=f"did you mean {close[0]}?" if close else "choose one of these",
        )
    return OBJECTIVES[name](config)


__all__ = ["OBJECTIVES", "LossSums", "Microbatch", "MicrobatchLoss", "Objective", "make_objective"]
