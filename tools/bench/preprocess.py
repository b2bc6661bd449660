#!/usr/bin/env python3
"""Speed and memory of tools/preprocess.py against the plain Hugging Face loop, on the same file, tokenizer and number of workers.

    python tools/bench/preprocess.py --input corpus.jsonl --tokenizer qwen --scratch /tmp/bench --workers 2 --repeats 3

The plain loop is that of Megatron's own preprocess_data.py: a pool of processes parses lines and encodes their texts one by one
with `tokenizers` (EOS, PAD and MASK that a text spells stay text, as in ours), and the parent appends each document with
Megatron's IndexedDatasetBuilder. Both run as processes of their own, in turn; a run's time is that of the whole process, start-up
included. Also printed are the time of tokenising alone (for ours with the start of the workers, for the plain loop without it)
and the CPU time of all processes, which other work on the machine hardly changes. The .bin files must be equal byte for byte.
Memory is the sum over all processes of the run of what each holds privately (USS), at its peak.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dmtd.infra.console import ending_quietly

_ENCODER: Any = None


def _start(tokenizer_json: str) -> None:
    global _ENCODER
    from tokenizers import Tokenizer

    _ENCODER = Tokenizer.from_str(tokenizer_json)
    _ENCODER.encode_special_tokens = True


def _encode(line: str) -> list[int]:
    ids: list[int] = _ENCODER.encode(json.loads(line)["text"], add_special_tokens=False).ids
    return ids


def plain_loop(source: str, tokenizer_dir: str, prefix: str, *, num_workers: int) -> float:
    """The plain loop; returns the seconds between the first document and the last."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    from megatron_dmtd.data.corpora.tokenizer import control_ids, encoder_json, load_tokenizer, vocabulary_size

    tokenizer = load_tokenizer(tokenizer_dir)
    control = control_ids(tokenizer)
    tokenizer_json = encoder_json(tokenizer, control, chats=False)
    vocab_size = vocabulary_size(tokenizer_json, control)
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=DType.optimal_dtype(vocab_size))
    import torch

    with Path(source).open(encoding="utf-8") as lines, multiprocessing.Pool(num_workers, _start, (tokenizer_json,)) as pool:
        started = time.perf_counter()
        for ids in pool.imap(_encode, lines, 32):
            ids.append(control.eos)
            builder.add_document(torch.IntTensor(ids), [len(ids)])
        builder.finalize(prefix + ".idx")
        return time.perf_counter() - started


def ours(source: str, tokenizer_dir: str, prefix: str, *, num_workers: int) -> float:
    """Our own run; returns the seconds from the choice of the encoder, when the work begins, to the finished files."""
    from megatron_dmtd.data.corpora.preprocess import PreprocessOptions, preprocess
    from megatron_dmtd.data.corpora.sources import open_inputs

    began: list[float] = []
    options = PreprocessOptions(tokenizer_dir=tokenizer_dir, output_prefix=prefix, num_workers=num_workers, overwrite=True)
    preprocess(open_inputs([source]), options, say=lambda _: began.append(time.perf_counter()))
    return time.perf_counter() - began[-1]


def worker_rates(source: str, tokenizer_dir: str) -> dict[str, float]:
    """Tokens per CPU second of one worker of each kind, lines parsed, ids compared: a figure that other work hardly changes."""
    from megatron_dmtd.data.corpora.encoding import BlockEncoder, EncodingJob
    from megatron_dmtd.data.corpora.fast_encoder import fast_model
    from megatron_dmtd.data.corpora.inputs import BLOCK_BYTES
    from megatron_dmtd.data.corpora.sources import open_inputs
    from megatron_dmtd.data.corpora.tokenizer import control_ids, encoder_json, load_tokenizer, vocabulary_size

    tokenizer = load_tokenizer(tokenizer_dir)
    control = control_ids(tokenizer)
    text = encoder_json(tokenizer, control, chats=False)
    job = EncodingJob(
        tokenizer_dir=tokenizer_dir,
        tokenizer_json=text,
        encoder="gigatoken",
        fast_model=fast_model(text, chats=False),
        control=control,
        vocab_size=vocabulary_size(text, control),
        chats=False,
        assistant_loss=False,
        heldout_fraction=0.0,
        dtype=np.int32,
    )
    encode = BlockEncoder(job)
    (lines,) = open_inputs([source])
    started = time.process_time()
    fast = [encode(block).splits["all"].tokens_N for block in lines.blocks(BLOCK_BYTES)]
    fast_s = time.process_time() - started
    _start(text)
    with Path(source).open(encoding="utf-8") as stream:
        started = time.process_time()
        plain = [[*_encode(line), control.eos] for line in stream]
        plain_s = time.process_time() - started
    assert np.array_equal(np.concatenate(fast), np.concatenate(plain)), "the ids differ"
    num_tokens = sum(ids.size for ids in fast)
    return {"tokens": num_tokens, "plain": num_tokens / plain_s, "ours": num_tokens / fast_s, "speed_up": plain_s / fast_s}


_LOOPS = {"plain": plain_loop, "ours": ours}


def _measure(loop: str, parsed: argparse.Namespace, prefix: Path) -> dict[str, float]:
    """One run in a process of its own: seconds, seconds of tokenising, peak memory in MiB."""
    import psutil

    command = [sys.executable, __file__, "--input", parsed.input, "--tokenizer", parsed.tokenizer, "--run", loop]
    command += ["--scratch", str(prefix), "--workers", str(parsed.workers)]
    started = time.perf_counter()
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak, ended, usage = 0.0, 0, None
    while not ended:
        total = 0
        try:
            parent = psutil.Process(run.pid)
            for process in (parent, *parent.children(recursive=True)):
                total += process.memory_full_info().uss
        except psutil.NoSuchProcess:
            pass  # it ended between two looks
        peak = max(peak, total / 2**20)
        time.sleep(0.2)
        ended, status, usage = os.wait4(run.pid, os.WNOHANG)
    seconds = time.perf_counter() - started
    run.returncode = os.waitstatus_to_exitcode(status)
    assert run.stdout is not None and usage is not None and run.returncode == 0, run.returncode
    tokenising = float(run.stdout.read().split()[-1])
    return {"whole_s": seconds, "tokenising_s": tokenising, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_mib": peak}


def main() -> int:
    """Run both loops in turn and print medians as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, help="a .jsonl file with a `text` in each line")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--scratch", required=True, help="a folder for the outputs; emptied")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--loops", nargs="+", default=list(_LOOPS), choices=list(_LOOPS))
    parser.add_argument("--worker-rates", action="store_true", help="only tokens per CPU second of one worker of each kind")
    parser.add_argument("--run", choices=list(_LOOPS), help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.run:
        print(_LOOPS[parsed.run](parsed.input, parsed.tokenizer, parsed.scratch, num_workers=parsed.workers))
        return 0
    if parsed.worker_rates:
        print(json.dumps(worker_rates(parsed.input, parsed.tokenizer), indent=1))
        return 0
    scratch = Path(parsed.scratch)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    runs: dict[str, list[dict[str, float]]] = {loop: [] for loop in parsed.loops}
    for _ in range(parsed.repeats):
        for loop in parsed.loops:
            runs[loop].append(_measure(loop, parsed, scratch / loop))
    medians = {loop: {key: statistics.median(run[key] for run in some) for key in some[0]} for loop, some in runs.items()}
    report: dict[str, Any] = {"input_bytes": Path(parsed.input).stat().st_size, "workers": parsed.workers, "medians": medians}
    if len(parsed.loops) == 2:
        assert (scratch / "plain.bin").read_bytes() == (scratch / "ours.bin").read_bytes(), "the outputs differ"
        report["bytes_equal"] = True
        for key in ("whole_s", "tokenising_s", "cpu_s"):
            ratios = [plain[key] / own[key] for plain, own in zip(runs["plain"], runs["ours"])]
            report[f"speed_up_{key}"] = {"median": statistics.median(ratios), "each": ratios}
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
