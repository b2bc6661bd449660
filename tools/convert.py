"""Convert between Hugging Face directories and training checkpoints, without a GPU.

    python tools/convert.py import Qwen3-4B-Base start --variant causal-refresh --num-parallel-layers 28 --mask-token-id 151660
    python tools/convert.py export runs/mine exported --dtype bfloat16
    python tools/convert.py inspect runs/mine

`import` makes a checkpoint to start training from (`checkpoint.init_from`). `export` takes a checkpoint, or a run's newest one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from megatron_dmtd.config import CycleConfig
from megatron_dmtd.conversion.convert import Contents, export_hf, import_hf, inspect
from megatron_dmtd.cycle import VARIANTS
from megatron_dmtd.errors import ConfigError, DMTDError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CYCLE_OPTIONS = ("num_parallel_layers", "cycle_length", "mask_token_id")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)

    importing = commands.add_parser("import", help="Hugging Face directory to checkpoint", allow_abbrev=False)
    importing.add_argument("hf_directory", help="Qwen3, Llama or DMTD model directory with safetensors")
    importing.add_argument("output", help="directory to make")
    importing.add_argument(
        "--variant", choices=sorted(VARIANTS), help="what an ordinary decoder is to learn; without it: vanilla"
    )
    importing.add_argument("--num-parallel-layers", type=int, help="layers that run once per cycle; goes with --variant")
    importing.add_argument("--mask-token-id", type=int, help="id of a token not yet known; goes with --variant")
    importing.add_argument("--cycle-length", type=int, help="tokens per cycle, 4 if not given; goes with --variant")

    exporting = commands.add_parser("export", help="checkpoint to Hugging Face directory", allow_abbrev=False)
    exporting.add_argument("checkpoint", help="checkpoint, or run directory (its newest one)")
    exporting.add_argument("output", help="directory to make")
    exporting.add_argument("--dtype", choices=list(_DTYPES), help="type to store; without it: as in the checkpoint")
    exporting.add_argument("--vanilla", action="store_true", help="as an ordinary decoder that transformers knows")
    exporting.add_argument("--tokenizer", help="directory of the tokenizer to copy; without it: the checkpoint's data.tokenizer")

    inspecting = commands.add_parser("inspect", help="what a directory holds, and whether it is whole", allow_abbrev=False)
    inspecting.add_argument("path", help="Hugging Face directory, checkpoint or run directory")
    return parser


def _cycle(arguments: argparse.Namespace) -> CycleConfig | None:
    """The cycles that the options describe; None without options. Split and mask id have no default that fits every model."""
    given = {name: getattr(arguments, name) for name in _CYCLE_OPTIONS if getattr(arguments, name) is not None}
    if arguments.variant is None and not given:
        return None
    missing = [name for name in ("variant", "num_parallel_layers", "mask_token_id") if getattr(arguments, name) is None]
    if missing:
        raise ConfigError(
            found="no " + ", ".join("--" + name.replace("_", "-") for name in missing),
            required="--variant, --num-parallel-layers and --mask-token-id together, or none of the cycle's options",
            remedy="give all three, or import as a vanilla decoder",
        )
    return CycleConfig(variant=arguments.variant, **given)


def _summary(contents: Contents) -> str:
    model, cycle = contents.model, contents.cycle
    types = sorted({str(spec.dtype).removeprefix("torch.") for spec in contents.tensors.values()})
    method: str = cycle.variant
    if not cycle.is_vanilla:
        method += f", cycle length {cycle.cycle_length}, parallel layers {cycle.num_parallel_layers}, mask {cycle.mask_token_id}"
    return "\n".join(
        (
            f"{contents.directory}: {contents.kind}",
            f"method: {method}",
            f"layers: {model.num_layers}, hidden {model.hidden_size}, feed-forward {model.intermediate_size}, "
            f"heads {model.num_attention_heads} over {model.num_key_value_heads} x {model.head_dim}",
            f"vocabulary: {model.vocab_size}, {'tied' if model.tie_word_embeddings else 'untied'} head",
            f"q/k norm: {'yes' if model.qk_norm else 'no'}, rope theta {model.rope_theta:g}, norm eps {model.rms_norm_eps:g}",
            f"tensors: {len(contents.tensors)}, all accounted for; {contents.num_parameters:,} numbers, {', '.join(types)}",
        )
    )


def _run(arguments: argparse.Namespace) -> str:
    if arguments.command == "import":
        return _summary(import_hf(arguments.hf_directory, arguments.output, cycle=_cycle(arguments)))
    if arguments.command == "export":
        contents = export_hf(
            arguments.checkpoint,
            arguments.output,
            dtype=_DTYPES.get(arguments.dtype),
            as_vanilla=arguments.vanilla,
            tokenizer_dir=arguments.tokenizer,
        )
        return _summary(contents)
    contents = inspect(arguments.path)
    lines = [
        f"{str(spec.dtype).removeprefix('torch.'):9} {list(spec.shape)!s:16} {name}" for name, spec in contents.tensors.items()
    ]
    return "\n".join((*lines, _summary(contents)))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 refused (the message says what to change)."""
    try:
        print(_run(_parser().parse_args(argv)))
    except DMTDError as error:
        print(f"{type(error).__name__}\n{error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
