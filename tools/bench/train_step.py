#!/usr/bin/env python3
"""Time a training step of the same model in every form, in one process and one run.

    python tools/bench/train_step.py --seq-lengths 1024 4096 --threads 2

Forms: Megatron's own GPTModel as an ordinary decoder (the baseline), this project's vanilla model and its four variants, and the
Hugging Face code of this repository with autograd. A step is a forward and a backward pass over one row; the optimizer, the same
for all, is left out. Forms take turns in every round, so that drift of the machine meets all of them; figures are medians.

Columns: tokens/s; ratio to GPTModel; the ratio that FLOPs alone would give (its limit) and the share of it that is reached; the
share of the machine's limit, max(bytes / bandwidth, FLOPs / peak), measured at the start (as `machine.py` does; the bytes are
those of the weights, read twice, and of their gradients).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_dmtd.infra.console import ending_quietly

# torch takes seconds, which help and refusals need not wait for
if TYPE_CHECKING:
    import torch

    from megatron_dmtd.architecture import Schedule
    from megatron_dmtd.platform.machine import Machine

SIZES = {
    "5M": {
        "num_layers": 8,
        "hidden_size": 192,
        "intermediate_size": 576,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 4096,
    },
    "20M": {
        "num_layers": 9,
        "hidden_size": 384,
        "intermediate_size": 1152,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 8192,
    },
    "135M": {
        "num_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
    },
}
VARIANTS = ("vanilla", "causal-norefresh", "causal-refresh", "bidirectional-norefresh", "bidirectional-refresh")
BASELINE = "GPTModel"
FORMS = (BASELINE, *VARIANTS, *(f"HF {variant}" for variant in VARIANTS[1:]))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="20M", help="parameters of the model (default: %(default)s)")
    parser.add_argument("--seq-lengths", type=int, nargs="+", default=[1024, 4096], help="slots per row (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each form (default: %(default)s)")
    parser.add_argument(
        "--forms", nargs="+", choices=FORMS, default=FORMS, metavar="FORM", help=f"of {', '.join(FORMS)} (default: all)"
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of weights and activations")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own number)")
    parser.add_argument("--json", default="", help="also write the figures to this file")
    return parser.parse_args()


def config_of(size: str, variant: str, seq_length: int, precision: str = "fp32") -> Any:
    """A configuration of one form: parallel layers are seven of nine, as in the published models."""
    from megatron_dmtd.config import Config, CycleConfig, DataConfig, ModelConfig, TrainingConfig

    shape = SIZES[size]
    model = ModelConfig(**shape, max_position_embeddings=seq_length, rope_theta=1e4)  # type: ignore[arg-type]
    parallel_layers = round(shape["num_layers"] * 7 / 9)
    cycle = CycleConfig(variant=variant, num_parallel_layers=parallel_layers, mask_token_id=1)  # type: ignore[arg-type]
    training = TrainingConfig(precision=precision)  # type: ignore[arg-type]
    return Config(model=model, cycle=cycle, data=DataConfig(seq_length=seq_length, pad_token_id=0), training=training)


def causal_attention() -> type[torch.nn.Module]:
    """The kernel of the vanilla model's attention, for Megatron's GPTModel."""
    import torch

    class CausalAttention(torch.nn.Module):
        def __init__(self, **_: Any) -> None:
            super().__init__()

        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: None, /, **_: Any) -> torch.Tensor:
            """[s, b, heads, width] to [s, b, heads * width]."""
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.permute(2, 0, 1, 3).flatten(2)

    return CausalAttention


def gpt_model(config: Any) -> torch.nn.Module:
    """Megatron's ordinary decoder of the same shape."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_dmtd.models.norm import RMSNorm
    from megatron_dmtd.models.transformer_config import transformer_config
    from megatron_dmtd.models.vocab import padded_vocab_size

    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = RMSNorm
    attention.core_attention = causal_attention()
    megatron_config = dataclasses.replace(transformer_config(config, on_cuda=False), perform_initialization=True)
    return GPTModel(
        megatron_config,
        spec,
        vocab_size=padded_vocab_size(config.model.vocab_size),
        max_sequence_length=config.data.seq_length,
        position_embedding_type="rope",
        rotary_base=int(config.model.rope_theta),
        share_embeddings_and_output_weights=True,
    )


def forms(names: Sequence[str], size: str, seq_length: int, precision: str, platform: Any) -> dict[str, Callable[[], None]]:
    """One step of the baseline and of each form of `names`, by name."""
    import torch

    from megatron_dmtd.families import ModelDescription, write_fields
    from megatron_dmtd.hf import DMTDQwen3Config, DMTDQwen3ForCausalLM
    from megatron_dmtd.models.transformer_config import DTYPES
    from megatron_dmtd.training.setup import build_models

    tokens = torch.randint(2, SIZES[size]["vocab_size"], (1, seq_length))
    positions = torch.arange(seq_length)[None]
    steps: dict[str, Callable[[], None]] = {}

    def add(name: str, model: torch.nn.Module, loss: Callable[[torch.nn.Module], torch.Tensor]) -> None:
        def step() -> None:
            model.zero_grad(set_to_none=True)
            loss(model).sum().backward()

        steps[name] = step

    add(
        BASELINE,
        gpt_model(config_of(size, "vanilla", seq_length, precision)).to(DTYPES[precision]),
        lambda m: m(tokens, positions, None, labels=tokens),
    )
    for variant in (variant for variant in VARIANTS if variant in names):
        (model,) = build_models(config_of(size, variant, seq_length, precision), platform)
        add(variant, model, lambda m: m(tokens, positions, tokens, document_lengths=((seq_length,),)))
    for variant in (variant for variant in VARIANTS if f"HF {variant}" in names):
        config = config_of(size, variant, seq_length)
        hf = DMTDQwen3ForCausalLM(DMTDQwen3Config(**write_fields(ModelDescription(model=config.model, cycle=config.cycle))))
        add(f"HF {variant}", hf.to(DTYPES[precision]), lambda m: m(tokens, labels=tokens, use_cache=False).loss)
    return steps


def seconds(step: Callable[[], None]) -> float:
    """Wall time of one step."""
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def measure(options: argparse.Namespace, seq_length: int, platform: Any, limits: Machine) -> list[dict[str, Any]]:
    """Figures of the forms at one length."""
    from megatron_dmtd.architecture import decoder_tensors
    from megatron_dmtd.architecture.flops import training_flops
    from megatron_dmtd.config.decoder import schedule_of
    from megatron_dmtd.models.transformer_config import DTYPES

    steps = forms(options.forms, options.size, seq_length, options.precision, platform)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(options.rounds):
        for name, step in steps.items():
            times[name].append(seconds(step))

    def schedule(variant: str) -> Schedule:
        config = config_of(options.size, variant, seq_length)
        return schedule_of(config.model, config.cycle)

    def flops(variant: str) -> int:
        return training_flops(schedule(variant), document_lengths=[seq_length])

    dtype = DTYPES[options.precision]
    weight_bytes = dtype.itemsize * sum(math.prod(one.shape) for one in decoder_tensors(schedule("vanilla").decoder).values())
    rows = []
    for name, samples in times.items():
        variant = "vanilla" if name == BASELINE else name.removeprefix("HF ")
        median = statistics.median(samples)
        # Pair by pair, so that a slow stretch of the machine meets both sides of a ratio.
        ratio = statistics.median(mine / theirs for mine, theirs in zip(samples, times[BASELINE], strict=True))
        limit = flops(variant) / flops("vanilla")
        rows.append(
            {
                "form": name,
                "precision": options.precision,
                "seq_length": seq_length,
                "tokens_per_s": seq_length / median,
                "seconds": median,
                "time_ratio_to_gpt": ratio,
                "flops_ratio": limit,
                "share_of_limit": limit / ratio,
                "share_of_machine": limits.seconds(num_bytes=3 * weight_bytes, flops=flops(variant), dtype=dtype) / median,
                "spread": (max(samples) - min(samples)) / median,
            }
        )
    return rows


def _in_words(limits: Machine) -> dict[str, Any]:
    rates = {str(dtype).removeprefix("torch."): rate for dtype, rate in limits.flops_per_s.items()}
    return {"bytes_per_s": limits.bytes_per_s, "flops_per_s": rates}


def main() -> int:
    """Print a table per length."""
    options = arguments()
    import torch

    options.threads = options.threads or torch.get_num_threads()
    torch.set_num_threads(options.threads)
    from megatron_dmtd.config import Config
    from megatron_dmtd.models.transformer_config import DTYPES
    from megatron_dmtd.parallel.groups import init_parallel, shut_down
    from megatron_dmtd.platform import machine, prepare_megatron

    platform = prepare_megatron()
    init_parallel(Config(), platform)
    print(
        f"{options.size} parameters, {options.precision}, {platform.describe()}, medians of {options.rounds} rounds", flush=True
    )
    dtype = DTYPES[options.precision]
    limits = machine.measure(platform.device, dtypes=(dtype,))
    print(f"limits: {limits.bytes_per_s / 1e9:.1f} GB/s, {limits.flops_per_s[dtype] / 1e9:.0f} GFLOP/s", flush=True)
    results = []
    for seq_length in options.seq_lengths:
        rows = measure(options, seq_length, platform, limits)
        results += rows
        print(f"\n{seq_length} tokens", flush=True)
        print(f"{'form':32}{'tokens/s':>10}{'time/GPT':>10}{'FLOPs/GPT':>11}{'of limit':>10}{'of machine':>12}{'spread':>8}")
        for row in rows:
            print(
                f"{row['form']:32}{row['tokens_per_s']:10,.0f}{row['time_ratio_to_gpt']:10.3f}{row['flops_ratio']:11.3f}"
                f"{row['share_of_limit']:10.1%}{row['share_of_machine']:12.1%}{row['spread']:8.0%}"
            )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {"size": options.size, "threads": options.threads, "limits": _in_words(limits), "rows": results}, file, indent=2
            )
    shut_down()
    return 0


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
