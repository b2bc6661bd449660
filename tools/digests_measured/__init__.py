"""What `tools/digests.py` measures: cases, each a name and a function that gives named figures of one source tree.

Only public surface is driven, so that the same files measure trees of different ages: the commands in `tools/`, their dotted
options, `metrics.jsonl`, checkpoints and exports on disk, `megatron_dmtd.inference.Engine` and `AutoModelForCausalLM`. Commands
run in forks of a process that has imported the large libraries, which saves most of the time. All is seeded, on one thread.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

from .conversion import EXPORTED, export_items
from .decoding import DECODINGS, engine_items, hf_model_items
from .figures import Items, MeasureError, under
from .plans_and_masks import PICTURES, PLANNED, RECIPES, mask_items, plan_items
from .training import LAYOUTS, train_items
from .tree import KINDS, VARIANTS, Tree

__all__ = ["Case", "Items", "MeasureError", "Tree", "cases", "preload", "under"]

Case = tuple[str, Callable[[Tree], Items]]


def cases() -> Iterator[Case]:
    """Every case: its name, whose first part is its section, and what gives its items."""
    for recipe, layout in itertools.product(RECIPES, PLANNED):
        yield f"plans/{recipe}/{layout}", functools.partial(plan_items, recipe=recipe, layout=layout)
    for kind, picture in itertools.product(KINDS, PICTURES):
        if not (kind == "vanilla" and picture.startswith("decode")):
            yield f"masks/{kind}/{picture}", functools.partial(mask_items, kind=kind, picture=picture)
    for name, layout in LAYOUTS.items():
        for kind in layout.kinds:
            yield f"train/{kind}/{name}", functools.partial(train_items, kind=kind, layout=name)
    for name, kinds in EXPORTED.items():
        for kind in kinds:
            yield f"exports/{kind}/{name}", functools.partial(export_items, kind=kind, layout=name)
    for name in DECODINGS:
        yield f"engine/{name}", functools.partial(engine_items, name=name)
    for kind in VARIANTS:
        yield f"hf/{kind}", functools.partial(hf_model_items, kind=kind)


def preload() -> None:
    """Import, once for all forked processes, the large libraries that commands import."""
    import jsonargparse  # noqa: F401
    import megatron.core.dist_checkpointing
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.optimizer
    import megatron.core.optimizer_param_scheduler
    import megatron.core.pipeline_parallel  # noqa: F401
    import transformers  # noqa: F401
