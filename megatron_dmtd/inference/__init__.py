"""Decoding: continuous batching over a paged K/V store, with one pass over the parallel layers per cycle. No Megatron here.

Names are imported when they are first used, so that commands can read their options before the slow imports of torch and
transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_dmtd.inference.config import EngineConfig
    from megatron_dmtd.inference.engine import Engine
    from megatron_dmtd.inference.requests import Completion, Event
    from megatron_dmtd.inference.sampling_params import SamplingParams
    from megatron_dmtd.inference.scoring import score

__all__ = ["Completion", "Engine", "EngineConfig", "Event", "SamplingParams", "score"]
_MODULES = {
    "Completion": "requests",
    "Engine": "engine",
    "EngineConfig": "config",
    "Event": "requests",
    "SamplingParams": "sampling_params",
    "score": "scoring",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
