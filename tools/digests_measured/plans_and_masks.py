"""What `tools/plan.py` and `tools/inspect_mask.py` print."""

from __future__ import annotations

import json
from typing import Any

from .figures import Items, MeasureError, leaves
from .tree import KINDS, Tree, account

RECIPES = (
    *(f"quickstart/{name}" for name in ("base", "bidirectional-refresh", "vanilla")),
    *(f"{family}/{kind}" for family in ("qwen3-4b", "smollm2-135m") for kind in KINDS),
)
PLANNED: dict[str, dict[str, Any]] = {
    "as-it-is": {},
    "tp2": {"parallel.tensor": 2, "parallel.sequence_parallel": True},
    "pp2": {"parallel.pipeline": 2},
    "pp2-virtual": {"parallel.pipeline": 2, "parallel.virtual_stages": 2},
    "recompute": {"parallel.recompute": "full", "training.precision": "fp32"},
}


def plan_items(tree: Tree, recipe: str, layout: str) -> Items:
    """Every number of a plan for four processes, or that it is refused."""
    options = [*tree.arguments(PLANNED[layout]), "--world-size", "4", "--json", *(["--cpu"] if layout == "recompute" else [])]
    found = tree.command("plan", "--config", f"examples/{recipe}.yaml", *options, may_fail=True)
    if found.status not in (0, 2):
        raise MeasureError(account(f"tools/plan.py on {recipe}", found))
    return leaves(json.loads(found.output)) if found.status == 0 else {"status": "refused"}


PICTURES = {
    "documents-12": ("--documents", "12"),
    "documents-8,5,1": ("--documents", "8,5,1"),
    "documents-9-cycle-3": ("--documents", "9,4", "--cycle-length", "3"),
    "decode-cycle-0": ("--decode-cycle", "0"),
    "decode-cycle-2": ("--decode-cycle", "2"),
}


def mask_items(tree: Tree, kind: str, picture: str) -> Items:
    """The lines of a picture."""
    lines = tree.command("inspect_mask", "--variant", kind, *PICTURES[picture]).output.splitlines()
    return {f"line-{index:02}": line for index, line in enumerate(lines)}
