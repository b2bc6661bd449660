#!/usr/bin/env python3
"""Time decoding: one process, one run, one set of random weights, one set of kernels; vanilla against the four variants.

    python tools/bench/decode.py --threads 2 --batches 1 2 4 8 --contexts 128 1024
    python tools/bench/decode.py --batches 1 --contexts 128 4096 --hf --profile --rounds 9
    python tools/bench/decode.py --alignment --contexts 128
    python tools/bench/decode.py --prefill 512 1536

Kinds take turns in every round, a whole cycle of tokens each, so that drift of the machine meets all of them; figures are medians
over rounds. Caches are filled with random numbers instead of by a prompt: the time of a step depends on their length only.

Columns: tokens/s; ratio to vanilla (median of the rounds' ratios); its limit by weight traffic, and the share of it; milliseconds
of a cycle; the machine's limit for it, max(bytes / bandwidth, FLOPs / peak) of each pass, and the share of that; milliseconds of
its bare matrix products (same weights, same rows, our fastest kernel, same round), and the share of those. Bandwidth and peak are
measured at the start, as `machine.py` does; the bytes are weights and cached keys and values.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron_dmtd.architecture import decoder_tensors, make_schedule
from megatron_dmtd.architecture import tensors as names
from megatron_dmtd.architecture.schedule import PARALLEL, SEQUENTIAL
from megatron_dmtd.cycle import ORDINARY, VANILLA, VARIANTS, Method
from megatron_dmtd.errors import DMTDError
from megatron_dmtd.families import hf_name, read_fields
from megatron_dmtd.inference import EngineConfig, SamplingParams
from megatron_dmtd.infra.console import ending_quietly

# torch and transformers take seconds, which help and refusals need not wait for
if TYPE_CHECKING:
    import torch

    from megatron_dmtd.hf import DMTDQwen3Config
    from megatron_dmtd.inference import Engine
    from megatron_dmtd.inference.ops.linear import DenseLinear
    from megatron_dmtd.inference.ops.protocol import Ops
    from megatron_dmtd.inference.weights import ModelWeights
    from megatron_dmtd.platform.machine import Machine

#: 1.1 GB of fp32 weights: too large for any cache, small enough for a workstation.
MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_parallel_layers": 12,
    "num_sequential_layers": 4,
    "vocab_size": 32_000,
    "mask_token_id": 31_999,
    "tie_word_embeddings": True,
    "max_position_embeddings": 16_384,
}
CYCLE = 4
KINDS = (VANILLA, *VARIANTS)
PARAMS = SamplingParams(ignore_eos=True)
#: What all figures but those of `show_kernels` are measured with; see `--cpu-time`.
clock: Callable[[], float] = time.perf_counter


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128], help="tokens in the caches at the start")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of one cycle per kind; one more is not counted")
    parser.add_argument("--threads", type=int, help="default: torch's own number")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="CPU time of one thread instead of wall time: the only clock that means something on a machine that others use too",
    )
    parser.add_argument("--kernels", choices=("auto", "native", "torch"), default="auto")
    parser.add_argument(
        "--matrix-dtype", choices=("float32", "bfloat16"), default="float32", help="of weights; arithmetic is fp32"
    )
    parser.add_argument("--layers", type=int, nargs=2, metavar=("P", "S"), help="numbers of parallel and sequential layers")
    parser.add_argument("--hf", action="store_true", help="also Hugging Face generate on the same weights, batch 1")
    parser.add_argument(
        "--profile", action="store_true", help="also where the time of a cycle goes, at the first batch and context"
    )
    parser.add_argument("--alignment", action="store_true", help="instead: requests at mixed phases, heads aligned and not")
    parser.add_argument(
        "--prefill",
        type=int,
        nargs="+",
        metavar="TOKENS",
        help="instead: prompts of these lengths, one at a time, to their first token",
    )
    parser.add_argument("--json", help="file to write all figures to")
    return parser.parse_args(argv)


def random_model(layers: Sequence[int] | None, matrix_dtype: torch.dtype | None = None) -> tuple[DMTDQwen3Config, ModelWeights]:
    """Weights of one size for all kinds."""
    import torch

    from megatron_dmtd.hf import DMTDQwen3Config
    from megatron_dmtd.inference.weights import build_model

    fields = dict(MODEL)
    if layers:
        fields |= {"num_parallel_layers": layers[0], "num_sequential_layers": layers[1]}
    config = DMTDQwen3Config(**fields)
    description = read_fields(config.to_dict())
    generator = torch.Generator().manual_seed(0)
    shapes = decoder_tensors(description.decoder)

    def read(name: str) -> torch.Tensor:
        size = shapes[name].shape
        return torch.ones(size) if len(size) == 1 else torch.empty(size).normal_(std=0.02, generator=generator)

    return config, build_model(description.schedule, read, matrix_dtype=matrix_dtype)


def _num_streams(kind: str) -> int:
    """Streams of the parallel layers."""
    return len(Method(variant=kind, num_parallel_layers=1).streams)


def as_kind(model: ModelWeights, kind: str) -> ModelWeights:
    """The same weights, decoded as `kind`."""
    if kind == VANILLA:
        method = ORDINARY
    else:
        method = dataclasses.replace(model.method, variant=kind)
    return dataclasses.replace(model, schedule=make_schedule(model.schedule.decoder, method))


def filled_engine(model: ModelWeights, kind: str, starts: Sequence[int], *, max_new: int, options: dict) -> Engine:
    """An engine in the middle of decoding: request i has `starts[i]` tokens in its caches, of random contents."""
    import torch

    from megatron_dmtd.inference import Engine

    longest = max(starts) + max_new + 2 * CYCLE
    config = EngineConfig(
        max_batch=len(starts),
        max_length=longest,
        cache_tokens=len(starts) * (longest + 32),
        prefix_caching=False,
        **options,
    )
    engine = Engine(as_kind(model, kind), config)
    for place in (place for group in engine.store.groups.values() for place in group.places):
        place.k_PGDT.normal_()
        place.v_PGTD.normal_()
    generator = torch.Generator().manual_seed(1)
    for start in starts:
        prompt = torch.randint(0, 1000, (start + 1,), generator=generator).tolist()
        engine.submit(prompt, max_new_tokens=max_new, params=PARAMS)
    for sequence, start in zip(engine.scheduler.waiting, starts):
        sequence.num_taken = start
        engine.store.grow(sequence.tables, start)
    return engine


def cycle_s(engine: Engine) -> float:
    """Seconds for one cycle of tokens of every request."""
    start = clock()
    for _ in range(CYCLE):
        engine.step()
    return clock() - start


def linears_of(model: ModelWeights, pass_name: str) -> list[DenseLinear]:
    """What one pass of the schedule multiplies with, but for the head."""
    return [linear for visit in model.schedule.pass_visits(pass_name) for linear in model.layers[visit.layer].linears]


class BareProducts:
    """The matrix products of a cycle and nothing else, through the fastest kernel."""

    def __init__(self, model: ModelWeights, batch: int) -> None:
        from megatron_dmtd.inference.native.build import load_kernels
        from megatron_dmtd.inference.ops.matmul import DenseProduct

        self.model, self.batch = model, batch
        sample = [linear for layer in model.layers[:2] for linear in layer.linears]
        self.fastest = DenseProduct(load_kernels(), sample, max_rows=max(2 * CYCLE * batch, 8))

    def _products(self, linears: Sequence[DenseLinear], rows: int) -> Callable[[], None]:
        import torch

        inputs = {width: torch.randn(rows, width) for width in {linear.in_features for linear in linears}}
        outputs = {width: torch.empty(rows, width) for width in {linear.out_features for linear in linears}}

        def run() -> None:
            for linear in linears:
                self.fastest.into(outputs[linear.out_features], inputs[linear.in_features], linear, None)

        return run

    def parts(self) -> dict[str, Callable[[], None]]:
        """What cycles are made of."""
        parallel, sequential = (linears_of(self.model, pass_name) for pass_name in (PARALLEL, SEQUENTIAL))
        return {
            "parallel, one block": self._products(parallel, CYCLE * self.batch),
            "parallel, two blocks": self._products(parallel, 2 * CYCLE * self.batch),
            "all layers, a token": self._products([*parallel, *sequential, self.model.head], self.batch),
            "sequential, a token": self._products([*sequential, self.model.head], self.batch),
        }

    @staticmethod
    def cycle_of(kind: str, part_s: dict[str, float]) -> float:
        """Seconds of a cycle of `kind`."""
        if kind == VANILLA:
            return CYCLE * part_s["all layers, a token"]
        blocks = "parallel, two blocks" if _num_streams(kind) == 2 else "parallel, one block"
        return part_s[blocks] + CYCLE * part_s["sequential, a token"]


def machine_limit_s(model: ModelWeights, kind: str, batch: int, context: int, limits: Machine) -> float:
    """The least time for a cycle of `kind` on this machine: for each pass, reading or multiplying, whichever takes longer."""
    parallel, sequential = (linears_of(model, pass_name) for pass_name in (PARALLEL, SEQUENTIAL))
    dtype = model.head.weight.dtype  # peaks of the type that weights are stored in: the highest that a kernel may reach

    def pass_s(linears: Sequence[DenseLinear], visits: int, rows: int) -> float:
        weights = sum(linear.in_features * linear.out_features for linear in linears)
        cached = visits * batch * context * 2 * model.schedule.decoder.layers[0].attention.key_size * model.embedding_VX.itemsize
        return limits.seconds(
            num_bytes=cached + sum(linear.num_bytes for linear in linears), flops=2 * rows * weights, dtype=dtype
        )

    num_parallel, num_sequential = (len(model.schedule.pass_visits(pass_name)) for pass_name in (PARALLEL, SEQUENTIAL))
    if kind == VANILLA:
        return CYCLE * pass_s([*parallel, *sequential, model.head], num_parallel + num_sequential, batch)
    return pass_s(parallel, num_parallel, _num_streams(kind) * CYCLE * batch) + CYCLE * pass_s(
        [*sequential, model.head], num_sequential, batch
    )


def traffic_limit(model: ModelWeights) -> float:
    """Bytes of weights that a vanilla cycle reads, over those of a cycle with one parallel pass."""
    parallel = sum(linear.num_bytes for linear in linears_of(model, PARALLEL))
    sequential = sum(linear.num_bytes for linear in linears_of(model, SEQUENTIAL)) + model.head.num_bytes
    return CYCLE * (parallel + sequential) / (parallel + CYCLE * sequential)


def timed(run: Callable[[], None]) -> float:
    """Seconds of one call."""
    start = clock()
    run()
    return clock() - start


def cell(
    model: ModelWeights, kinds: Sequence[str], batch: int, context: int, options: argparse.Namespace, limits: Machine
) -> list[dict]:
    """Figures of every kind at one batch and context."""
    max_new = CYCLE * (options.rounds + 2)
    settings = {"kernels": options.kernels}
    engines = {kind: filled_engine(model, kind, [context] * batch, max_new=max_new, options=settings) for kind in kinds}
    bare = BareProducts(model, batch)
    parts = bare.parts()
    rounds: list[tuple[dict[str, float], dict[str, float]]] = []
    for _ in range(options.rounds + 1):
        cycles = {kind: cycle_s(engine) for kind, engine in engines.items()}
        part_s = {name: timed(run) for name, run in parts.items()}
        rounds.append((cycles, {kind: bare.cycle_of(kind, part_s) for kind in kinds}))
    least_s = {kind: machine_limit_s(model, kind, batch, context, limits) for kind in kinds}
    return [_figures(model, kind, batch, context, rounds[1:]) | _of_machine(least_s[kind], kind, rounds[1:]) for kind in kinds]


def _of_machine(limit_s: float, kind: str, rounds: list) -> dict:
    return {
        "machine_limit_ms": 1e3 * limit_s,
        "share_of_machine": limit_s / statistics.median(cycles[kind] for cycles, _ in rounds),
    }


def _figures(model: ModelWeights, kind: str, batch: int, context: int, rounds: list) -> dict:
    cycle = statistics.median(cycles[kind] for cycles, _ in rounds)
    bare = statistics.median(products[kind] for _, products in rounds)
    ratio = statistics.median(cycles[VANILLA] / cycles[kind] for cycles, _ in rounds) if VANILLA in rounds[0][0] else None
    limit = 1.0 if kind == VANILLA else traffic_limit(model)
    return {
        "batch": batch,
        "context": context,
        "kind": kind,
        "tokens_per_s": CYCLE * batch / cycle,
        "ratio": ratio,
        "traffic_limit": limit,
        "share_of_traffic_limit": None if ratio is None else ratio / limit,
        "cycle_ms": 1e3 * cycle,
        "bare_ms": 1e3 * bare,
        "share_of_bare": statistics.median(products[kind] / cycles[kind] for cycles, products in rounds),
        "fastest_cycle_ms": 1e3 * min(cycles[kind] for cycles, _ in rounds),
        "fastest_bare_ms": 1e3 * min(products[kind] for _, products in rounds),
    }


def show(figures: list[dict]) -> None:
    """One line per figure."""
    print(
        f"{'batch':>5} {'context':>7} {'kind':24} {'tok/s':>8} {'ratio':>6} {'limit':>6} {'share':>6} "
        f"{'cycle ms':>9} {'machine':>8} {'share':>6} {'bare ms':>8} {'share':>6} {'fastest cycle / bare ms':>24}"
    )
    for row in figures:
        ratio, share = (f"{row[name]:6.2f}" if row[name] else "     -" for name in ("ratio", "share_of_traffic_limit"))
        print(
            f"{row['batch']:5} {row['context']:7} {row['kind']:24} {row['tokens_per_s']:8.2f} {ratio} "
            f"{row['traffic_limit']:6.2f} {share} {row['cycle_ms']:9.1f} "
            f"{row['machine_limit_ms']:8.1f} {row['share_of_machine']:6.2f} {row['bare_ms']:8.1f} {row['share_of_bare']:6.2f} "
            f"{row['fastest_cycle_ms']:14.1f} / {row['fastest_bare_ms']:7.1f}",
            flush=True,
        )


def show_kernels(model: ModelWeights, max_rows: int) -> dict:
    """The kernels of products, and oneDNN's prepacked weights (a second copy) for comparison, by number of rows."""
    import torch

    from megatron_dmtd.inference.native.build import load_kernels
    from megatron_dmtd.inference.ops.matmul import FEW_ROWS, ROW_COUNTS, DenseProduct, fastest_ms

    sample = [linear for layer in model.layers[:2] for linear in layer.linears]
    fastest = DenseProduct(load_kernels(), sample, max_rows=max_rows)
    table = {}
    for rows in (1, 2, 4, *(rows for rows in (FEW_ROWS, *ROW_COUNTS) if rows <= max_rows)):
        packed = {id(linear): torch.ops.mkldnn._reorder_linear_weight(linear.weight, rows) for linear in sample}

        def onednn(out, x, linear, residual, packed=packed) -> None:
            torch.ops.mkldnn._linear_pointwise(x, packed[id(linear)], None, "none", [], "")

        others = {"onednn prepacked": onednn} if sample[0].weight.dtype == torch.float32 else {}
        table[rows] = fastest_ms({**fastest.kernels, **others}, sample, rows)
    print(f"products with {len(sample)} matrices of two layers, ms (fastest of a few):")
    for rows, times in table.items():
        figures = "  ".join(f"{name} {ms:.2f}" for name, ms in times.items())
        print(f"{rows:4} rows  {figures}  -> {fastest.kernel_for(rows)}")
    return table


def hf_token_s(config: DMTDQwen3Config, model: ModelWeights, kind: str, context: int) -> float:
    """Seconds per token of Hugging Face generate on the same memory: a call for many tokens less a call for one."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from megatron_dmtd.hf import DMTDQwen3Config, DMTDQwen3ForCausalLM

    fields = config.to_dict()
    if kind == VANILLA:
        for name in ("model_type", "architectures", "transformers_version"):
            fields.pop(name, None)
        build = lambda: Qwen3ForCausalLM(Qwen3Config(**fields))  # noqa: E731
    else:
        history, block = VARIANTS[kind]
        fields |= {"dmtd_history_mode": history, "dmtd_block_attention": block}
        build = lambda: DMTDQwen3ForCausalLM(DMTDQwen3Config(**fields))  # noqa: E731
    with torch.device("meta"):
        slow = build()
    slow.load_state_dict(_unfused(model), strict=True, assign=True)
    if kind == VANILLA:
        slow.model.rotary_emb = type(slow.model.rotary_emb)(slow.config)  # its buffers were made on "meta"
    slow = slow.eval()
    prompt = torch.randint(0, 1000, (1, context), generator=torch.Generator().manual_seed(1))
    common = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def seconds(count: int) -> float:
        return timed(lambda: slow.generate(prompt, max_new_tokens=count, **common))

    seconds(2)
    return (statistics.median(seconds(17) for _ in range(3)) - statistics.median(seconds(1) for _ in range(3))) / 16


def _unfused(model: ModelWeights) -> dict[str, torch.Tensor]:
    """Hugging Face's names for views of the fused matrices."""
    weights = {f"{names.EMBEDDING}.weight": model.embedding_VX, f"{names.FINAL_NORM}.weight": model.final_norm.weight}
    for index, layer in enumerate(model.layers):
        sizes = layer.spec.attention
        qkv = layer.qkv.weight.split([sizes.query_size, sizes.key_size, sizes.key_size])
        parts = dict(zip((names.QUERY, names.KEY, names.VALUE), qkv))
        parts |= dict(zip((names.GATE, names.UP), layer.gate_up.weight.chunk(2)))
        parts |= {names.OUTPUT: layer.o.weight, names.DOWN: layer.down.weight}
        parts |= {names.ATTENTION_NORM: layer.attention_norm.weight, names.MLP_NORM: layer.mlp_norm.weight}
        if layer.q_norm is not None and layer.k_norm is not None:
            parts |= {names.QUERY_NORM: layer.q_norm.weight, names.KEY_NORM: layer.k_norm.weight}
        weights |= {names.layer_name(index, f"{name}.weight"): tensor for name, tensor in parts.items()}
    return {hf_name(name, model.schedule.decoder): tensor for name, tensor in weights.items()} | {
        "lm_head.weight": model.head.weight
    }


def profile(model: ModelWeights, kind: str, batch: int, context: int, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a cycle by operation; "rest" is planning, scheduling, choosing tokens and Python between operations."""
    engine = filled_engine(
        model, kind, [context] * batch, max_new=CYCLE * (options.rounds + 2), options={"kernels": options.kernels}
    )
    spent_s: dict[str, float] = {}

    def watched(name: str, function: Callable) -> Callable:
        def call(*args, **kwargs):
            start = clock()
            result = function(*args, **kwargs)
            spent_s[name] = spent_s.get(name, 0.0) + clock() - start
            return result

        return call

    choose = engine.runner.forward.ops

    def watched_ops(run) -> Ops:
        ops = choose(run)
        for name in ("norm", "linear", "linear_add", "gate", "rotate_and_store", "attend", "head"):
            setattr(ops, name, watched(name, getattr(ops, name)))
        return ops

    cycle_s(engine)
    engine.runner.forward.ops = watched_ops
    total = sum(cycle_s(engine) for _ in range(options.rounds))
    figures = {name: 1e3 * seconds / options.rounds for name, seconds in spent_s.items()}
    figures["rest"] = 1e3 * total / options.rounds - sum(figures.values())
    print(f"{kind}, batch {batch}, context {context}, ms of a cycle: " + ", ".join(f"{n} {ms:.2f}" for n, ms in figures.items()))
    return figures


def alignment(model: ModelWeights, kind: str, batch: int, context: int, options: argparse.Namespace) -> dict:
    """Tokens per second of requests at mixed phases, with heads aligned and not; the two take turns, a cycle each."""
    starts = [context + request % CYCLE for request in range(batch)]
    engines, cycles, counts = {}, {"aligned": [], "free": []}, {}
    for name in cycles:
        settings = {"kernels": options.kernels, "align_heads": name == "aligned"}
        engines[name] = filled_engine(model, kind, starts, max_new=CYCLE * (options.rounds + 3), options=settings)
        for _ in range(2 * CYCLE):  # those out of phase join
            engines[name].step()
        counts[name] = engines[name].stats.num_new_tokens
    for _ in range(options.rounds):
        for name, engine in engines.items():
            cycles[name].append(cycle_s(engine))
    figures: dict = {"kind": kind, "batch": batch, "context": context}
    for name, engine in engines.items():
        tokens = (engine.stats.num_new_tokens - counts[name]) / options.rounds
        figures[name] = tokens / statistics.median(cycles[name])
    figures["gain"] = figures["aligned"] / figures["free"]
    print(
        f"{kind}, batch {batch}, context {context}: {figures['aligned']:.2f} tokens/s aligned, {figures['free']:.2f} not, "
        f"gain {figures['gain']:.2f}",
        flush=True,
    )
    return figures


def prefill(model: ModelWeights, length: int, options: argparse.Namespace, flops_per_s: float) -> list[dict]:
    """Prompt tokens per second of every kind, which take turns; and the share of the time that products need at peak."""
    import torch

    from megatron_dmtd.inference import Engine

    room = length + 2 * CYCLE
    config = EngineConfig(max_batch=1, max_length=room, cache_tokens=room + 32, prefix_caching=False, kernels=options.kernels)
    engines = {kind: Engine(as_kind(model, kind), config) for kind in options.kinds}
    prompt = torch.randint(0, 1000, (length,), generator=torch.Generator().manual_seed(1)).tolist()

    def first_token_s(engine: Engine) -> float:
        return timed(lambda: engine.generate([prompt], max_new_tokens=1, params=PARAMS))

    turns = range(options.rounds + 1)
    rounds = [{kind: first_token_s(engine) for kind, engine in engines.items()} for _ in turns][1:]
    figures = []
    for kind in options.kinds:
        seconds = statistics.median(one[kind] for one in rounds)
        streams = 2 if kind != VANILLA and VARIANTS[kind][0] == "real" else 1
        weights = [sum(one.weight.numel() for one in linears_of(model, name)) for name in (PARALLEL, SEQUENTIAL)]
        least_s = 2 * length * (streams * weights[0] + weights[1]) / flops_per_s
        ratio = statistics.median(one[kind] / one[VANILLA] for one in rounds) if VANILLA in rounds[0] else None
        figures.append({"kind": kind, "length": length, "tokens_per_s": length / seconds, "time_to_vanilla": ratio})
        figures[-1]["share_of_limit"] = least_s / seconds
        shown = "-" if ratio is None else f"{ratio:.2f}"
        rate, share = length / seconds, least_s / seconds
        print(f"prompt of {length}, {kind}: {rate:.0f} tokens/s, {shown} of vanilla's time, {share:.2f} of the limit", flush=True)
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 refused."""
    options = arguments(argv)
    import torch

    if options.cpu_time:
        global clock
        clock, options.threads = time.thread_time, 1
    options.threads = options.threads or torch.get_num_threads()
    torch.set_num_threads(options.threads)
    config, model = random_model(options.layers, getattr(torch, options.matrix_dtype))
    weight_bytes = sum(linear.num_bytes for layer in model.layers for linear in layer.linears) + model.head.num_bytes
    load = os.getloadavg()[0]
    clock_name = "CPU time" if options.cpu_time else "wall time"
    size = f"{weight_bytes / 1e9:.2f} GB of {options.matrix_dtype} weights"
    print(f"{size}, {options.threads} threads, {clock_name}, load at the start {load:.1f}", flush=True)
    from megatron_dmtd.platform import machine

    limits = machine.measure(torch.device("cpu"), dtypes=(getattr(torch, options.matrix_dtype),))
    peak = limits.flops_per_s[getattr(torch, options.matrix_dtype)]
    print(f"limits: {limits.bytes_per_s / 1e9:.1f} GB/s, {peak / 1e9:.0f} GFLOP/s", flush=True)
    results: dict = {"weight_bytes": weight_bytes, "threads": options.threads, "load": load}
    results["limits"] = {"bytes_per_s": limits.bytes_per_s, "flops_per_s": peak}
    try:
        with torch.inference_mode():
            if options.alignment:
                cells = [(kind, batch) for kind in options.kinds if kind != VANILLA for batch in options.batches]
                results["alignment"] = [alignment(model, kind, batch, options.contexts[0], options) for kind, batch in cells]
            elif options.prefill:
                results["prefill"] = [row for length in options.prefill for row in prefill(model, length, options, peak)]
            else:
                results["kernels"] = show_kernels(model, 2 * CYCLE * max(options.batches))
                results["cells"] = []
                for batch in options.batches:
                    for context in options.contexts:
                        figures = cell(model, options.kinds, batch, context, options, limits)
                        show(figures)
                        results["cells"] += figures
            if options.profile:
                place = (options.batches[0], options.contexts[0])
                results["profile"] = {kind: profile(model, kind, *place, options) for kind in options.kinds}
            if options.hf:
                results["hf_tokens_per_s"] = {
                    kind: 1 / hf_token_s(config, model, kind, options.contexts[0]) for kind in options.kinds
                }
                for kind, rate in results["hf_tokens_per_s"].items():
                    print(f"Hugging Face generate, {kind}, batch 1, context {options.contexts[0]}: {rate:.2f} tokens/s")
    except DMTDError as error:
        print(f"{type(error).__name__}\n{error}", file=sys.stderr)
        return 2
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
