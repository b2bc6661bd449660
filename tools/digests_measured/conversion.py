"""Exports of training checkpoints by `tools/convert.py`, imports of them, and what transformers computes from them."""

from __future__ import annotations

import json
from pathlib import Path

from .decoding import hf_items
from .figures import Items, leaves, tensor, under
from .training import MASK, ONE, VOCABULARY, checkpoint_items, trained
from .tree import KINDS, Tree

#: training layout -> kinds whose checkpoints are exported
EXPORTED = {"single": KINDS, "pp2-virtual": ONE, "untied-pp2": ONE, "llama-tp2": ONE, "bf16": ONE}


def directory_items(directory: Path) -> Items:
    """Fields of config.json, and every tensor."""
    from safetensors import safe_open

    found = under("config", leaves(json.loads((directory / "config.json").read_text())))
    tensors: Items = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: tensor(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    return found | under("tensors", dict(sorted(tensors.items())))


def export_items(tree: Tree, kind: str, layout: str) -> Items:
    """A run's checkpoint exported as it is, in bfloat16 and as vanilla; imported again; and what transformers computes."""
    run = str(trained(tree, kind, layout) / "checkpoints")
    folder = tree.scratch / f"exports-{kind}-{layout}"
    folder.mkdir()
    exported, vanilla, half, back = (folder / name for name in ("exported", "vanilla", "bfloat16", "imported"))
    tree.command("convert", "export", run, str(exported))
    tree.command("convert", "export", run, str(half), "--dtype", "bfloat16")
    tree.command("convert", "import", str(exported), str(back))
    tree.command("convert", "verify", run, str(exported))
    items = under("exported", directory_items(exported)) | under("bfloat16", directory_items(half))
    items |= under("imported", tree.computed(lambda: checkpoint_items(back)))
    if kind == "vanilla":
        split = ("--variant", "causal-refresh", "--num-parallel-layers", "2", "--mask-token-id", str(MASK))
        tree.command("convert", "import", str(exported), str(folder / "continued"), *split)
        items |= under("continued", tree.computed(lambda: checkpoint_items(folder / "continued")))
    else:
        tree.command("convert", "export", run, str(vanilla), "--vanilla")
        items |= under("vanilla", directory_items(vanilla))
    return items | under("hf", tree.computed(lambda: hf_items(exported, vocabulary=VOCABULARY - 1)))
