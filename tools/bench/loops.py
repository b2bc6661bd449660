#!/usr/bin/env python3
"""Time decoding with looped layers: normalized decoders like Dory's, by number of loops, with cycles and without; batch 1.

    python tools/bench/loops.py --loops 1 2 4 --context 128 --cpu-time
    python tools/bench/loops.py --loops 4 --kinds vanilla causal-norefresh --hf --rounds 5

All share one set of random weights, larger than caches. They take turns in every round, four tokens each, so that drift of the
machine meets all of them; figures are medians over rounds. Caches are filled with random numbers.

Columns: visits for four tokens; tokens/s; milliseconds of four tokens; those of their bare matrix products (same weights, same
rows, our fastest kernel, every visit, same round), and the share of those; the ratio to the same number of loops without cycles,
its limit by weight traffic, and the share of that. `--hf` adds transformers' Dory on the same weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from megatron_dmtd.architecture import Schedule, decoder_tensors, make_schedule
from megatron_dmtd.architecture.flops import decoding_weights
from megatron_dmtd.architecture.schedule import PARALLEL, SEQUENTIAL
from megatron_dmtd.config.decoder import decoder_of
from megatron_dmtd.config.sections import ModelConfig
from megatron_dmtd.cycle import ORDINARY, VANILLA, VARIANTS, Method
from megatron_dmtd.errors import ConfigError, DMTDError
from megatron_dmtd.inference import EngineConfig, SamplingParams
from megatron_dmtd.infra.console import ending_quietly

# torch and transformers take seconds, which help and refusals need not wait for
if TYPE_CHECKING:
    import torch
    from transformers import DoryForCausalLM

    from megatron_dmtd.inference import Engine
    from megatron_dmtd.inference.ops.linear import DenseLinear
    from megatron_dmtd.inference.weights import ModelWeights

#: Half of Dory 4B's width, a quarter of its layers: 0.9 GB of fp32 weights.
MODEL = {
    "hidden_size": 1280,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 16_000,
}
INPUT, RECURRENT, OUTPUT = 2, 5, 2
CYCLE, SAMPLES = 4, SamplingParams(ignore_eos=True)
KINDS = (VANILLA, *VARIANTS)
clock: Callable[[], float] = time.perf_counter


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--loops", type=int, nargs="+", default=[1, 2, 4], help="numbers of loops")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[VANILLA, "causal-norefresh"])
    parser.add_argument("--mode", choices=("per_loop", "last_loop"), default="per_loop", help="what is cached")
    parser.add_argument("--context", type=int, default=128, help="tokens in the caches at the start")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds; one more is not counted")
    parser.add_argument("--threads", type=int, help="default: torch's own number")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of one thread instead of wall time")
    parser.add_argument("--matrix-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--hf", action="store_true", help="also transformers' Dory, computed in the type of the weights")
    parser.add_argument("--json", help="file to write all figures to")
    return parser.parse_args(argv)


def settings() -> ModelConfig:
    """The model."""
    return ModelConfig(
        num_layers=INPUT + RECURRENT + OUTPUT,
        tie_word_embeddings=False,
        normalized=True,
        num_input_layers=INPUT,
        num_recurrent_layers=RECURRENT,
        max_position_embeddings=4096,
        rope_theta=10_000.0,
        **MODEL,
    )


def schedule_of(kind: str, num_loops: int, mode: str) -> Schedule:
    """How `kind` visits the model's layers. With cycles, the input layers and the loop are parallel ones."""
    method = ORDINARY
    if kind != VANILLA:
        last = MODEL["vocab_size"] - 1
        method = Method(variant=kind, cycle_length=CYCLE, mask_token_id=last, num_parallel_layers=INPUT + RECURRENT)
    decoder = decoder_of(settings())
    schedule = make_schedule(decoder, method)
    from megatron_dmtd.inference.loops import scheduled_with

    return scheduled_with(schedule, num_loops, mode)  # type: ignore[arg-type]


def random_model(matrix_dtype: torch.dtype) -> ModelWeights:
    """The weights that all kinds share."""
    import torch

    from megatron_dmtd.inference.weights import build_model

    schedule, config, generator = schedule_of(VANILLA, 1, "per_loop"), settings(), torch.Generator().manual_seed(0)
    shapes = decoder_tensors(schedule.decoder)

    def read(name: str) -> torch.Tensor:
        size = shapes[name].shape
        if len(size) == 1:
            return torch.full(size, 1.0 if "mlp." in name else config.init_std)
        return torch.empty(size).normal_(std=size[1] ** -0.5, generator=generator)

    return build_model(schedule, read, matrix_dtype=matrix_dtype)


def filled_engine(model: ModelWeights, schedule: Schedule, context: int, max_new: int) -> Engine:
    """An engine in the middle of decoding one request, `context` tokens of random contents in its caches."""
    import dataclasses

    import torch

    from megatron_dmtd.inference import Engine

    longest = context + max_new + 2 * CYCLE
    config = EngineConfig(max_batch=1, max_length=longest, cache_tokens=longest + 32, prefix_caching=False)
    engine = Engine(dataclasses.replace(model, schedule=schedule), config)
    for place in (place for group in engine.store.groups.values() for place in group.places):
        place.k_PGDT.normal_()
        place.v_PGTD.normal_()
    prompt = torch.randint(0, 1000, (context + 1,), generator=torch.Generator().manual_seed(1)).tolist()
    engine.submit(prompt, max_new_tokens=max_new, params=SAMPLES)
    (sequence,) = engine.scheduler.waiting
    sequence.num_taken = context
    engine.store.grow(sequence.tables, context)
    return engine


class BareProducts:
    """The matrix products of four tokens and nothing else, through the fastest kernel, visit by visit."""

    def __init__(self, model: ModelWeights) -> None:
        from megatron_dmtd.inference.native.build import load_kernels
        from megatron_dmtd.inference.ops.matmul import DenseProduct

        self.model = model
        sample = [linear for layer in model.layers[:2] for linear in layer.linears]
        self.fastest = DenseProduct(load_kernels(), sample, max_rows=2 * CYCLE)

    def of(self, schedule: Schedule) -> Callable[[], None]:
        """Those of a schedule."""
        parallel, sequential = (list(self._linears(schedule, name)) for name in (PARALLEL, SEQUENTIAL))
        block = self._products(parallel, CYCLE * len(schedule.method.streams))
        token = self._products([*sequential, self.model.head], 1)

        def run() -> None:
            block()
            for _ in range(CYCLE):
                token()

        return run

    def _linears(self, schedule: Schedule, pass_name: str) -> Iterator[DenseLinear]:
        for visit in schedule.pass_visits(pass_name):
            yield from self.model.layers[visit.layer].linears  # type: ignore[misc]

    def _products(self, linears: Sequence[DenseLinear], rows: int) -> Callable[[], None]:
        import torch

        inputs = {width: torch.randn(rows, width) for width in {linear.in_features for linear in linears}}
        outputs = {width: torch.empty(rows, width) for width in {linear.out_features for linear in linears}}

        def run() -> None:
            for linear in linears:
                self.fastest.into(outputs[linear.out_features], inputs[linear.in_features], linear, None)

        return run


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = clock()
    run()
    return clock() - start


def four_tokens(engine: Engine) -> Callable[[], None]:
    """A call that decodes four tokens."""

    def run() -> None:
        for _ in range(CYCLE):
            engine.step()

    return run


def peer_model(model: ModelWeights, num_loops: int, mode: str) -> DoryForCausalLM:
    """Transformers' Dory on views of the same weights."""
    import torch
    from transformers import DoryConfig, DoryForCausalLM

    config, layers = settings(), INPUT + RECURRENT + OUTPUT
    rope = {"full_attention": {"rope_type": "default", "rope_theta": config.rope_theta}}
    with torch.device("meta"):
        slow = DoryForCausalLM(
            DoryConfig(
                **MODEL,
                num_hidden_layers=layers,
                layer_types=["full_attention"] * layers,
                initializer_range=config.init_std,
                n_input_layers=INPUT,
                n_recurrent_layers=RECURRENT,
                n_output_layers=OUTPUT,
                n_recurrent_loops=num_loops,
                recurrent_kv_cache_mode=mode,
                max_position_embeddings=4096,
                rope_parameters=rope,
            )
        )
    slow.load_state_dict(_unfused(model, slow), strict=True, assign=True)
    slow.model.rotary_emb = type(slow.model.rotary_emb)(slow.config)  # its buffers were made on "meta"
    return slow.eval()


def peer(model: ModelWeights, num_loops: int, mode: str, context: int) -> Callable[[], None]:
    """A call that decodes four tokens with transformers' Dory."""
    import torch
    from transformers import DynamicCache

    slow = peer_model(model, num_loops, mode)
    cache = DynamicCache(config=slow.config)
    slow(torch.randint(0, 1000, (1, context)), cache=cache, use_cache=True)
    token = torch.tensor([[1]])

    def run() -> None:
        for _ in range(CYCLE):
            token[0, 0] = slow(token, cache=cache, use_cache=True).logits[0, -1].argmax()

    return run


def _unfused(model: ModelWeights, slow: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Views of the fused matrices by transformers' names; vectors as a new model has them."""
    import torch

    found: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": model.embedding_VX,
        "lm_head.weight": model.head.weight,  # type: ignore[attr-defined]
    }
    for index, layer in enumerate(model.layers):
        sizes, name = layer.spec.attention, f"model.layers.{index}."
        fused = layer.qkv.weight.split([sizes.query_size, sizes.key_size, sizes.key_size, sizes.query_size])  # type: ignore[attr-defined]
        found |= {f"{name}self_attn.{part}_proj.weight": tensor for part, tensor in zip(("q", "k", "v", "gate"), fused)}
        gate, up = layer.gate_up.weight.chunk(2)  # type: ignore[attr-defined]
        found |= {f"{name}mlp.gate_proj.weight": gate, f"{name}mlp.up_proj.weight": up}
        found[f"{name}mlp.down_proj.weight"] = layer.down.weight  # type: ignore[attr-defined]
        found[f"{name}self_attn.o_proj.weight"] = layer.o.weight  # type: ignore[attr-defined]
    std = settings().init_std
    for name, tensor in slow.named_parameters():
        if name not in found:
            found[name] = torch.full(tensor.shape, 1.0 if ".suv_" in name else std, dtype=model.embedding_VX.dtype)
    return found


def measure(model: ModelWeights, options: argparse.Namespace) -> list[dict]:
    """Figures of every kind and number of loops."""
    bare, runs, bare_runs, schedules = BareProducts(model), {}, {}, {}
    for num_loops in options.loops:
        for kind in options.kinds:
            cell = kind, num_loops
            schedules[cell] = schedule_of(kind, num_loops, options.mode)
            engine = filled_engine(model, schedules[cell], options.context, CYCLE * (options.rounds + 2))
            if engine.kernel_note:
                raise ConfigError(found=engine.kernel_note, required="native kernels", remedy="install a C compiler")
            runs[cell], bare_runs[cell] = four_tokens(engine), bare.of(schedules[cell])
        if options.hf:
            runs["transformers", num_loops] = peer(model, num_loops, options.mode, options.context)
    rounds = [
        ({cell: timed(run) for cell, run in runs.items()}, {cell: timed(run) for cell, run in bare_runs.items()})
        for _ in range(options.rounds + 1)
    ][1:]
    return [_figures(cell, schedules.get(cell), schedules, rounds) for cell in runs]


def _figures(cell: tuple[str, int], schedule: Schedule | None, schedules: dict, rounds: list) -> dict:
    kind, num_loops = cell
    seconds = statistics.median(times[cell] for times, _ in rounds)
    base = VANILLA, num_loops
    figures = {"kind": kind, "loops": num_loops, "tokens_per_s": CYCLE / seconds, "ms": 1e3 * seconds}
    figures["ratio"] = statistics.median(times[base] / times[cell] for times, _ in rounds) if base in schedules else None
    if schedule is not None:
        parallel, sequential = (len(schedule.pass_visits(name)) for name in (PARALLEL, SEQUENTIAL))
        figures["visits"] = parallel + CYCLE * sequential
        figures["bare_ms"] = 1e3 * statistics.median(bare[cell] for _, bare in rounds)
        figures["share_of_bare"] = statistics.median(bare[cell] / times[cell] for times, bare in rounds)
        if base in schedules:
            figures["limit"] = decoding_weights(schedules[base]) / decoding_weights(schedule)
            figures["share_of_limit"] = figures["ratio"] / figures["limit"]
    return figures


def show(figures: list[dict]) -> None:
    """One line per figure."""
    print(
        f"{'kind':24} {'loops':>5} {'visits':>6} {'tok/s':>8} {'ms':>9} {'bare ms':>9} {'share':>6} {'ratio':>6} {'limit':>6} "
        f"{'share':>6}"
    )
    for row in figures:
        cells = [f"{row['kind']:24} {row['loops']:5} {row.get('visits', '-'):>6} {row['tokens_per_s']:8.2f} {row['ms']:9.1f}"]
        for name, width in (("bare_ms", 9), ("share_of_bare", 6), ("ratio", 6), ("limit", 6), ("share_of_limit", 6)):
            value = row.get(name)
            cells.append(f"{'-':>{width}}" if value is None else f"{value:{width}.2f}")
        print(" ".join(cells), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 refused."""
    options = arguments(argv)
    import torch

    if options.cpu_time:
        global clock
        clock, options.threads = time.thread_time, 1
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        if min(options.loops) < 1:
            raise ConfigError(found=f"--loops {min(options.loops)}", required="at least 1", remedy="change --loops")
        model = random_model(getattr(torch, options.matrix_dtype))
        weight_bytes = sum(linear.num_bytes for layer in model.layers for linear in layer.linears) + model.head.num_bytes
        print(
            f"{weight_bytes / 1e9:.2f} GB of {options.matrix_dtype} weights, {torch.get_num_threads()} threads, "
            f"{'CPU' if options.cpu_time else 'wall'} time, context {options.context}, {options.mode}",
            flush=True,
        )
        with torch.inference_mode():
            figures = measure(model, options)
    except DMTDError as error:
        print(f"{type(error).__name__}\n{error}", file=sys.stderr)
        return 2
    show(figures)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
