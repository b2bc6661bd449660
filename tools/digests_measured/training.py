"""Ten training steps of a tiny model, in many layouts, and the checkpoints that they end with."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .figures import Items, number, tensor, under
from .tree import KINDS, Tree

ONE = ("bidirectional-refresh",)
VOCABULARY, MASK, PAD = 100, 99, 0
OPTIONS: dict[str, Any] = {
    "model.num_layers": 4,
    "model.hidden_size": 32,
    "model.intermediate_size": 48,
    "model.num_attention_heads": 4,
    "model.num_key_value_heads": 2,
    "model.head_dim": 8,
    "model.vocab_size": VOCABULARY,
    "model.max_position_embeddings": 128,
    "model.rope_theta": 1e4,
    "model.init_std": 0.1,
    "model.tie_word_embeddings": True,
    "model.qk_norm": True,
    "cycle.num_parallel_layers": 2,
    "cycle.mask_token_id": MASK,
    "parallel.timeout_s": 120,
    "parallel.distributed_optimizer": True,
    "data.seq_length": 32,
    "data.pad_token_id": PAD,
    "optimizer.lr": 3e-3,
    "optimizer.min_lr": 3e-4,
    "optimizer.warmup_steps": 2,
    "optimizer.decay_steps": 10,
    "training.steps": 10,
    "training.micro_batch_size": 1,
    "training.global_batch_size": 4,
    "training.precision": "fp32",
    "training.seed": 1234,
    "training.eval_interval": 5,
    "training.eval_batches": 2,
    "checkpoint.interval": 0,
    "checkpoint.asynchronous": False,
    "logging.interval": 1,
    "logging.progress": False,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a run is spread over processes, and what else sets it apart."""

    ranks: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    kinds: Sequence[str] = KINDS
    first: str = ""
    """The layout of its first five steps, from whose checkpoint it goes on; empty: it makes all ten."""


_TP2, _PP2 = {"parallel.tensor": 2}, {"parallel.pipeline": 2}
LAYOUTS = {
    "single": Layout(),
    "tp2": Layout(ranks=2, options=_TP2),
    "pp2": Layout(ranks=2, options=_PP2),
    "pp2-virtual": Layout(ranks=2, options=_PP2 | {"parallel.virtual_stages": 2}),
    "dp2": Layout(ranks=2),
    "tp2-sequence": Layout(ranks=2, options=_TP2 | {"parallel.sequence_parallel": True}),
    "recompute": Layout(options={"parallel.recompute": "full"}),
    "untied-pp2": Layout(ranks=2, options=_PP2 | {"model.tie_word_embeddings": False}, kinds=ONE),
    "llama-tp2": Layout(ranks=2, options=_TP2 | {"model.qk_norm": False, "model.tie_word_embeddings": False}, kinds=ONE),
    "tp2-pp2": Layout(ranks=4, options=_TP2 | _PP2, kinds=("causal-refresh",)),
    "tp2-then-pp2": Layout(ranks=2, options=_PP2, kinds=ONE, first="tp2"),
    "dp2-plain-optimizer": Layout(ranks=2, options={"parallel.distributed_optimizer": False}, kinds=ONE),
    "bf16": Layout(options={"training.precision": "bf16"}, kinds=ONE),
    "masked": Layout(options={"parallel.attention_backend": "masked"}, kinds=ONE),
    "frozen": Layout(options={"training.freeze_embeddings": True}, kinds=ONE),
    "packed": Layout(
        options={
            "data.packing": "best-fit",
            "data.train_weights": [0.75, 0.25],
            "training.rampup_batch_size": [2, 1, 12],
            "optimizer.decay": "WSD",
            "optimizer.wsd_decay_steps": 4,
        },
        kinds=("causal-norefresh",),
    ),
}
_KEPT_METRIC = re.compile(r"(eval_)?loss(_phase_\d+)?|lr|grad_norm|global_batch_size")


def trained(tree: Tree, kind: str, name: str) -> Path:
    """The folder of a finished run, made when it is first asked for."""
    if (kind, name) not in tree.runs:
        layout, folder = LAYOUTS[name], tree.scratch / f"run-{kind}-{name}"
        own = {
            "cycle.variant": kind,
            "data.train": tree.corpora[:2],
            "data.valid": tree.corpora[2:],
            "checkpoint.dir": str(folder / "checkpoints"),
            "logging.dir": str(folder / "log"),
        }
        if layout.first:
            first = LAYOUTS[layout.first]
            options = OPTIONS | own | first.options | {"training.steps": 5}
            tree.command("train", *tree.arguments(options), ranks=first.ranks)
        tree.command("train", *tree.arguments(OPTIONS | own | layout.options), ranks=layout.ranks)
        tree.runs[kind, name] = folder
    return tree.runs[kind, name]


def metric_items(log: Path) -> Items:
    """Losses, gradient norms and learning rates of each step, to the last bit."""
    found: Items = {}
    for line in (log / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["step"] == 0:
            continue  # the baseline, which older trees do not measure
        for name, value in record.items():
            if _KEPT_METRIC.fullmatch(name):
                found[f"step-{record['step']:02}/{name}"] = number(float(value))
    return found


def checkpoint_items(directory: Path) -> Items:
    """Every tensor of the newest checkpoint below `directory`: weights and optimizer state, whole, layer by layer.

    How tensors are cut into files, and whether all layers of one are stacked in it, does not show.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    newest = max(directory.rglob(".metadata")).parent
    entries = dcp.FileSystemReader(newest).read_metadata().state_dict_metadata
    stored = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(stored, storage_reader=dcp.FileSystemReader(newest), no_dist=True)
    return {name: tensor(stored_tensor) for name, stored_tensor in sorted(by_layer(stored).items())}


def by_layer(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`layers.NAME`, with the layers as first axis, as `layers.0.NAME`, `layers.1.NAME` and so on."""
    found = {}
    for name, value in tensors.items():
        stacked = re.fullmatch(r"(.*\blayers)\.(?!\d)(.+)", name)
        parts = {f"{stacked[1]}.{index}.{stacked[2]}": part for index, part in enumerate(value)} if stacked else {name: value}
        found |= parts
    return found


def train_items(tree: Tree, kind: str, layout: str) -> Items:
    """Ten steps and the checkpoint that they end with."""
    folder = trained(tree, kind, layout)
    checkpoint = tree.computed(lambda: checkpoint_items(folder / "checkpoints"))
    return under("metrics", metric_items(folder / "log")) | under("checkpoint", checkpoint)
