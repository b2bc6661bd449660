#!/usr/bin/env python3
"""Measure checkpoints against the raw speed of the disk: save, blocking and load seconds, and bytes, at two sizes.

    python tools/bench/checkpoint.py --dir /scratch/bench --output bench_checkpoint.json

One process. `blocked` is how long training stands still: in a save that is waited for, all of it; in a background save, the copy,
and a moment at its end (`finish`).
The background save is measured while training steps run, as it is used. Raw speed: as many bytes, written and put on the disk
(fsync), and read back after the page cache was asked to drop them; so is the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_dmtd.config import CheckpointConfig, Config, CycleConfig, DataConfig, ModelConfig, TrainingConfig
from megatron_dmtd.infra.console import ending_quietly

SIZES = {
    "small": ModelConfig(
        num_layers=8, hidden_size=256, intermediate_size=768, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        vocab_size=4096, max_position_embeddings=512,
    ),
    "medium": ModelConfig(
        num_layers=12, hidden_size=512, intermediate_size=1536, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
        vocab_size=16384, max_position_embeddings=512,
    ),
}  # fmt: skip
_CHUNK = 16 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One size. Times in seconds, the best of the repeats."""

    size: str
    parameters: int
    bytes: int
    raw_write_s: float
    raw_read_s: float
    saved_and_waited_for_s: float
    """Blocked all the while."""
    background_blocked_s: float
    background_finish_s: float
    """Blocked again at its end: metadata, renaming, removing the checkpoint before it."""
    background_total_s: float
    """From its start to the moment it is visible, training steps running meanwhile."""
    verify_s: float
    """Reading all files and comparing their checksums; part of every load."""
    load_s: float


def _drop_from_cache(paths: list[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _raw(folder: Path, num_bytes: int) -> tuple[float, float]:
    path = folder / "raw"
    chunk = os.urandom(_CHUNK)
    started = time.perf_counter()
    with open(path, "wb") as file:
        for offset in range(0, num_bytes, _CHUNK):
            file.write(chunk[: min(_CHUNK, num_bytes - offset)])
        file.flush()
        os.fsync(file.fileno())
    write_s = time.perf_counter() - started
    _drop_from_cache([path])
    started = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.read(_CHUNK):
            pass
    read_s = time.perf_counter() - started
    path.unlink()
    return write_s, read_s


def _config(model: ModelConfig, folder: Path) -> Config:
    return Config(
        model=model,
        cycle=CycleConfig(num_parallel_layers=model.num_layers * 3 // 4, mask_token_id=1),
        data=DataConfig(seq_length=64, pad_token_id=0),
        training=TrainingConfig(global_batch_size=1),
        checkpoint=CheckpointConfig(dir=str(folder), keep_last=1),
    )


def _batches(config: Config) -> Any:
    import torch

    from megatron_dmtd.data.batches.batch import Batch

    length = config.data.seq_length
    tokens_BN = torch.arange(2, 2 + length).unsqueeze(0)
    while True:
        yield Batch(
            tokens_BN=tokens_BN,
            labels_BN=tokens_BN + 1,
            loss_mask_BN=torch.ones(1, length),
            positions_BN=torch.arange(length).unsqueeze(0),
            document_lengths=((length,),),
        )


def _best(earlier: dict[str, float], found: dict[str, float]) -> dict[str, float]:
    return {name: min(value, earlier.get(name, value)) for name, value in found.items()}


def _repeat(run: Any, batches: Any, folder: Path) -> tuple[dict[str, float], int]:
    """One round of everything that is measured on a run, and the bytes of a checkpoint."""
    from megatron_dmtd.infra import checksums
    from megatron_dmtd.training.checkpoints import paths
    from megatron_dmtd.training.checkpoints.checkpoint import load_checkpoint
    from megatron_dmtd.training.checkpoints.saving import Saver
    from megatron_dmtd.training.progress import Progress
    from megatron_dmtd.training.step import train_step

    saver, progress, found = Saver(run, folder), Progress.new(run.objective), {}
    train_step(run, batches)
    started = time.perf_counter()
    saver.save(progress)
    found["saved_and_waited_for_s"] = time.perf_counter() - started
    train_step(run, batches)
    started = time.perf_counter()
    saver.start(progress)
    found["background_blocked_s"] = saver.blocking_s
    while saver.is_writing:
        train_step(run, batches)
    written = time.perf_counter()
    final = saver.finish()
    assert final is not None
    found["background_finish_s"] = time.perf_counter() - written
    found["background_total_s"] = time.perf_counter() - started
    files = list(final.iterdir())
    _drop_from_cache(files)
    started = time.perf_counter()
    checksums.verify(final, paths.DAMAGED)
    found["verify_s"] = time.perf_counter() - started
    _drop_from_cache(files)
    started = time.perf_counter()
    load_checkpoint(run, final)
    found["load_s"] = time.perf_counter() - started
    num_bytes = sum(path.stat().st_size for path in files)
    found["raw_write_s"], found["raw_read_s"] = _raw(folder, num_bytes)
    return found, num_bytes


def measure(size: str, folder: Path, *, repeats: int) -> Measurement:
    """Measure one size in `folder`, which is removed afterwards."""
    from megatron_dmtd.parallel.groups import init_parallel, shut_down
    from megatron_dmtd.platform import prepare_megatron

    platform = prepare_megatron()
    from megatron_dmtd.training.setup import build_run

    config = _config(SIZES[size], folder)
    folder.mkdir(parents=True)
    init_parallel(config, platform)
    try:
        run = build_run(config, platform)
        batches, best, num_bytes = _batches(config), {}, 0
        for _ in range(repeats):
            found, num_bytes = _repeat(run, batches, folder)
            best = _best(best, found)
        parameters = sum(parameter.numel() for model in run.models for parameter in model.parameters())
        return Measurement(size=size, parameters=parameters, bytes=num_bytes, **best)
    finally:
        shut_down()
        shutil.rmtree(folder)


def _table(measured: list[Measurement]) -> str:
    rows = [f"{'':24}" + "".join(f"{one.size:>14}" for one in measured)]
    for name in Measurement.__dataclass_fields__:
        if name != "size":
            values = [getattr(one, name) for one in measured]
            rows.append(f"{name:24}" + "".join(f"{v:>14,}" if isinstance(v, int) else f"{v:>14.3f}" for v in values))
    rows.append(
        f"{'save / raw write':24}" + "".join(f"{one.saved_and_waited_for_s / one.raw_write_s:>14.2f}" for one in measured)
    )
    rows.append(f"{'load / raw read':24}" + "".join(f"{one.load_s / one.raw_read_s:>14.2f}" for one in measured))
    share = [(one.background_blocked_s + one.background_finish_s) / one.saved_and_waited_for_s for one in measured]
    rows.append(f"{'blocked, of a save':24}" + "".join(f"{value:>14.1%}" for value in share))
    return "\n".join(rows)


def main() -> int:
    """Exit status 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--dir", required=True, help="folder on the disk to measure; a new folder is made in it and removed")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=3, help="rounds; the best time of each counts (default: %(default)s)")
    parser.add_argument("--output", help="JSON file for the figures")
    arguments = parser.parse_args()
    folder = Path(arguments.dir)
    measured = [
        measure(size, folder / f"bench_checkpoint_{os.getpid()}_{size}", repeats=arguments.repeats) for size in arguments.sizes
    ]
    print(_table(measured))
    if arguments.output:
        Path(arguments.output).write_text(json.dumps([asdict(one) for one in measured], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
