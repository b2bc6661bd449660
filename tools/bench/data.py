#!/usr/bin/env python3
"""Tokens per second of loading, against what a training step consumes.

    python tools/bench/data.py --prefix data/python-train --seq-length 4096 --micro-batch-size 1
    python tools/bench/data.py --prefix data/python-train --seq-length 4096 --log run/metrics.jsonl --data-parallel 4

Reads rows of the corpus in training order, each batch as training takes it, from one thread. With the log of a run (or the figure
itself, --step-tokens-per-s) it says how many times faster one rank loads than its steps consume: the log counts the tokens of all
data-parallel ranks, each of which loads its share.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from typing import TYPE_CHECKING, get_args

from megatron_dmtd.infra.console import ending_quietly

# torch takes seconds, which help and refusals need not wait for
if TYPE_CHECKING:
    from megatron_dmtd.data.batches.dataset import PackedDataset


def measure(dataset: PackedDataset, *, micro_batch_size: int, num_batches: int, first_row: int, depth: int) -> float:
    """Slots per second of `num_batches` batches."""
    from megatron_dmtd.data.batches.loader import batches, collate, prefetched

    stream = batches(
        dataset,
        make_batch=collate,
        first_row=first_row,
        rows_of_batch=lambda _: micro_batch_size,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=0,
        data_parallel_size=1,
    )
    started = time.perf_counter()
    slots = sum(batch.tokens_BN.numel() for batch in itertools.islice(prefetched(stream, depth=depth), num_batches))
    return slots / (time.perf_counter() - started)


def consumed_tokens_per_s(log: str, *, data_parallel: int) -> float:
    """What one data-parallel rank of a logged run consumes: the median line, without the first, which may hold a compilation."""
    from megatron_dmtd.training.log import read_metrics

    lines = read_metrics(log)
    rates = [line["tokens_per_s"] for line in lines if "tokens_per_s" in line]
    return statistics.median(rates[1:] or rates) / data_parallel


def main() -> int:
    """Measure both ways of packing and print medians as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", nargs="+", required=True)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--cycle-length", type=int, default=4)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--batches", type=int, default=200, help="batches per repeat (default: 200)")
    parser.add_argument("--repeats", type=int, default=5)
    consumer = parser.add_mutually_exclusive_group()
    consumer.add_argument("--step-tokens-per-s", type=float, help="tokens/s that one data-parallel rank of training consumes")
    consumer.add_argument("--log", help="metrics.jsonl of a run, which tells it")
    parser.add_argument("--data-parallel", type=int, default=1, help="data-parallel ranks of that run (default: 1)")
    parsed = parser.parse_args()
    from megatron_dmtd.data.batches.dataset import PackedDataset
    from megatron_dmtd.data.batches.packing import Packing

    consumed = parsed.step_tokens_per_s
    if parsed.log:
        consumed = consumed_tokens_per_s(parsed.log, data_parallel=parsed.data_parallel)
    report: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as cache:
        for packing in get_args(Packing):
            options = {"seq_length": parsed.seq_length, "cycle_length": parsed.cycle_length, "packing": packing}
            started = time.perf_counter()
            dataset = PackedDataset(parsed.prefix, **options, pad_token_id=0, shuffle_seed=0, cache_dir=cache)
            built = time.perf_counter()
            PackedDataset(parsed.prefix, **options, pad_token_id=0, shuffle_seed=0, cache_dir=cache)
            figures = {"build_index_s": built - started, "open_with_index_s": time.perf_counter() - built}
            for depth in (0, 2):
                speeds = [
                    measure(
                        dataset,
                        micro_batch_size=parsed.micro_batch_size,
                        num_batches=parsed.batches,
                        first_row=repeat * parsed.batches * parsed.micro_batch_size,
                        depth=depth,
                    )
                    for repeat in range(parsed.repeats)
                ]
                figures[f"tokens_per_s_prefetch_{depth}"] = statistics.median(speeds)
            if consumed:
                figures["step_tokens_per_s"] = consumed
                figures["times_faster_than_the_step"] = figures["tokens_per_s_prefetch_0"] / consumed
            report[packing] = figures
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
