#!/usr/bin/env python3
"""Convert between Hugging Face directories and training checkpoints, without a GPU.

    python tools/convert.py import Qwen3-4B-Base start --variant causal-refresh --num-parallel-layers 28 --mask-token-id 151660
    python tools/convert.py export runs/mine exported --dtype bfloat16
    python tools/convert.py inspect runs/mine
    python tools/convert.py verify runs/mine exported --dtype bfloat16
    python tools/convert.py diff runs/mine runs/other

`import` makes a checkpoint to start training from (`checkpoint.init_from`). `export` takes a checkpoint, or the newest one of a
run. `verify` and `diff` compare any two Hugging Face directories, checkpoints or runs bit for bit: `verify` lists all
differences, `diff` also says how large they are. Checkpoints are verified against their checksums when they are read, unless
`--skip-checksums` is given. Exit status: 0 done or equal, 1 different, 2 refused, 130 interrupted.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dmtd.config import CycleConfig
from megatron_dmtd.cycle import VARIANTS
from megatron_dmtd.errors import CheckpointError, ConfigError, ConversionError, DMTDError
from megatron_dmtd.infra.checksums import CHECKSUMS_FILE, has_checksums
from megatron_dmtd.infra.console import ending_quietly
from megatron_dmtd.infra.directories import refuse_used
from megatron_dmtd.training.checkpoints.paths import find_step_directory

# torch takes seconds, which help and refusals need not wait for
if TYPE_CHECKING:
    import torch

    from megatron_dmtd.conversion.compare import Comparison
    from megatron_dmtd.conversion.sources import Source

_DTYPES = ("float32", "bfloat16", "float16")
_CYCLE_OPTIONS = ("num_parallel_layers", "cycle_length", "mask_token_id")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)

    importing = commands.add_parser("import", help="Hugging Face directory or GGUF file to checkpoint", allow_abbrev=False)
    importing.add_argument("hf_directory", help="Qwen3, Llama or DMTD model directory with safetensors, or a GGUF file")
    importing.add_argument("output", help="directory to create")
    importing.add_argument(
        "--variant", choices=sorted(VARIANTS), help="variant that an ordinary decoder will be trained as (default: vanilla)"
    )
    importing.add_argument("--num-parallel-layers", type=int, help="layers that run once per cycle; requires --variant")
    importing.add_argument("--mask-token-id", type=int, help="id that stands for a token not yet known; requires --variant")
    importing.add_argument("--cycle-length", type=int, help="tokens per cycle (default: 4); requires --variant")

    exporting = commands.add_parser("export", help="checkpoint to Hugging Face directory", allow_abbrev=False)
    exporting.add_argument("checkpoint", help="checkpoint, or run directory (its newest checkpoint)")
    exporting.add_argument("output", help="directory to create")
    exporting.add_argument("--dtype", choices=_DTYPES, help="type to store (default: that of the checkpoint)")
    exporting.add_argument(
        "--vanilla", action="store_true", help="export an ordinary decoder that transformers supports by itself"
    )
    exporting.add_argument("--tokenizer", help="directory of the tokenizer to copy (default: the checkpoint's data.tokenizer)")

    inspecting = commands.add_parser("inspect", help="what a directory holds, and whether it is complete", allow_abbrev=False)
    inspecting.add_argument("path", help="Hugging Face directory, checkpoint or run directory")

    verifying = commands.add_parser("verify", help="whether two directories hold the same model", allow_abbrev=False)
    diffing = commands.add_parser("diff", help="how much two models differ", allow_abbrev=False)
    for comparing in (verifying, diffing):
        comparing.add_argument("first", help="Hugging Face directory, checkpoint or run directory")
        comparing.add_argument("second", help="the same, to compare with the first")
        comparing.add_argument("--dtype", choices=_DTYPES, help="cast the first model's weights before comparing")
        comparing.add_argument(
            "--any-method", action="store_true", help="ignore differences in the method, as for a vanilla export"
        )
    for reading in (exporting, inspecting, verifying, diffing):
        reading.add_argument("--skip-checksums", action="store_true", help="do not verify checkpoints against their checksums")
    return parser


def _cycle(arguments: argparse.Namespace) -> CycleConfig | None:
    """The method that the options describe; None without options. Split and MASK id have no default that suits every model."""
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


def _dtype(arguments: argparse.Namespace) -> torch.dtype | None:
    """The type that --dtype names."""
    import torch

    return None if arguments.dtype is None else getattr(torch, arguments.dtype)


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _summary(source: Source) -> str:
    from megatron_dmtd.conversion.sources import num_parameters

    model, cycle = source.model, source.cycle
    types = sorted({_type_name(spec.dtype) for spec in source.stored.values()})
    method: str = cycle.variant
    if not cycle.is_vanilla:
        method += f", cycle length {cycle.cycle_length}, parallel layers {cycle.num_parallel_layers}, mask {cycle.mask_token_id}"
    return "\n".join(
        (
            f"{source.directory}: {source.kind}",
            f"method: {method}",
            f"layers: {model.num_layers}, hidden {model.hidden_size}, feed-forward {model.intermediate_size}, "
            f"heads {model.num_attention_heads} over {model.num_key_value_heads} x {model.head_dim}",
            f"vocabulary: {model.vocab_size}, {'tied' if model.tie_word_embeddings else 'untied'} head",
            f"q/k norm: {'yes' if model.qk_norm else 'no'}, rope theta {model.rope_theta:g}, norm eps {model.rms_norm_eps:g}",
            *_other_parts(source),
            f"tensors: {len(source.stored)}, all accounted for; {num_parameters(source):,} numbers, {', '.join(types)}",
        )
    )


def _other_parts(source: Source) -> list[str]:
    """A line on biases, windows and scaled frequencies, if the decoder has any."""
    model, scaling = source.model, source.model.rope_scaling
    found = ["states of norm 1"] if model.normalized else []
    found += [f"biases of {names}" for has, names in ((model.qkv_bias, "q, k, v"), (model.output_bias, "the output")) if has]
    if model.sliding_window:
        where = f"layers {list(model.windowed_layers)}" if model.windowed_layers else "every layer"
        found.append(f"window of {model.sliding_window} in {where}")
    if scaling.rope_type != "default":
        found.append(f"rope scaling {scaling.rope_type}, factor {scaling.factor:g}")
    if model.second_rope_layers:
        found.append(f"rope theta {model.second_rope_theta:g} in layers {list(model.second_rope_layers)}")
    if model.num_recurrent_layers:
        last = model.num_input_layers + model.num_recurrent_layers - 1
        looped = f"layers {model.num_input_layers} to {last} run {model.num_loops} times"
        found.append(f"{looped} ({model.injection}), cached {model.recurrent_kv_cache_mode}")
    return [", ".join(found)] if found else []


def _words_on_bytes(path: str, *, verified: bool) -> str:
    """What is known about the integrity of a model's files."""
    from megatron_dmtd.conversion.sources import is_hf_directory

    if is_hf_directory(path):
        return "no checksums in this format"
    if not has_checksums(find_step_directory(path)):
        return f"no {CHECKSUMS_FILE}: damage inside a tensor would go unnoticed"
    return f"as {CHECKSUMS_FILE} records them" if verified else "not compared with their checksums"


def _say_if_unverified(path: str, *, verified: bool) -> None:
    """Print a line on standard error about a checkpoint that is read without verification."""
    from megatron_dmtd.conversion.sources import is_hf_directory

    if not is_hf_directory(path) and not (verified and has_checksums(find_step_directory(path))):
        print(f"{path}: {_words_on_bytes(path, verified=verified)}", file=sys.stderr)


def _inspect(path: str, *, verify: bool) -> int:
    from megatron_dmtd.conversion.sources import open_source

    source = open_source(path, verify=verify)
    for name, spec in source.stored.items():
        print(f"{_type_name(spec.dtype):9} {list(spec.shape)!s:16} {name}")
    print(_summary(source))
    print(f"files: {_words_on_bytes(path, verified=verify)}")
    return 0


def _import(arguments: argparse.Namespace) -> Source:
    cycle = _cycle(arguments)
    from megatron_dmtd.conversion.convert import import_hf

    return import_hf(arguments.hf_directory, arguments.output, cycle=cycle)


def _export(arguments: argparse.Namespace) -> Source:
    from megatron_dmtd.conversion.convert import export_hf

    _say_if_unverified(arguments.checkpoint, verified=not arguments.skip_checksums)
    return export_hf(
        arguments.checkpoint,
        arguments.output,
        dtype=_dtype(arguments),
        as_vanilla=arguments.vanilla,
        tokenizer_dir=arguments.tokenizer,
        verify=not arguments.skip_checksums,
    )


def _names_only(comparison: Comparison) -> list[str]:
    values = [f"{item.name}: {item.num_different:,} of {item.num_elements:,} numbers differ" for item in comparison.values]
    return [*comparison.settings, *comparison.structure, *values]


def _with_sizes(comparison: Comparison) -> list[str]:
    """Lines with the size of each difference; the tensors that differ most come first."""
    lines = [*comparison.settings, *comparison.structure]
    if comparison.values:
        lines.append(f"{'relative':>10} {'largest':>10} {'differing':>20}  tensor")
    for item in sorted(comparison.values, key=lambda item: -item.relative):
        share = f"{item.num_different:,}/{item.num_elements:,}"
        lines.append(f"{item.relative:10.3e} {item.largest:10.3e} {share:>20}  {item.name}")
    return lines


def _compare(arguments: argparse.Namespace) -> int:
    from megatron_dmtd.conversion.compare import compare
    from megatron_dmtd.conversion.sources import open_source

    verify, paths = not arguments.skip_checksums, (arguments.first, arguments.second)
    first, second = (open_source(path, verify=verify) for path in paths)
    for path in paths:
        _say_if_unverified(path, verified=verify)
    comparison = compare(first, second, dtype=_dtype(arguments), ignore_cycles=arguments.any_method)
    lines = _names_only(comparison) if arguments.command == "verify" else _with_sizes(comparison)
    verdict = "the same model" if comparison.is_equal else "different"
    if comparison.differs_in_method_only:
        lines.append("only the method differs, as in an export with --vanilla: --any-method ignores it")
    print("\n".join((*lines, f"{verdict}: {comparison.num_equal} tensors equal bit for bit")))
    return 0 if comparison.is_equal else 1


def check_inputs(argv: Sequence[str], *, come_later: bool) -> None:
    """Refuse options that are not possible and, unless they `come_later`, inputs that are not there. Raises `DMTDError`."""
    parsed = _parser().parse_args(argv)
    if parsed.command == "import":
        _cycle(parsed)
    if parsed.command in ("import", "export"):
        refuse_used(Path(parsed.output), error=ConversionError)
    if come_later:
        return
    sources = {"import": ["hf_directory"], "export": ["checkpoint"], "inspect": ["path"]}.get(parsed.command, ["first", "second"])
    for path in (Path(getattr(parsed, name)) for name in sources):
        if not path.exists():
            raise CheckpointError(found=f"no file or directory {path}", required="a model to read", remedy="correct the path")
        if parsed.command == "export":
            find_step_directory(path)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "inspect":
        return _inspect(arguments.path, verify=not arguments.skip_checksums)
    if arguments.command in ("verify", "diff"):
        return _compare(arguments)
    if arguments.command == "import":
        made = _import(arguments)
    else:
        made = _export(arguments)
    print(_summary(made))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done or equal, 1 different, 2 refused (the message says what to change), 130 interrupted."""
    try:
        return _run(_parser().parse_args(argv))
    except DMTDError as error:
        print(f"{type(error).__name__}\n{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: no partial output remains; run the same command again", file=sys.stderr)
        return 130


def _end_on_signal(number: int, frame: object) -> None:
    """Exit through an exception, so that partial output is removed."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end_on_signal)
    sys.exit(ending_quietly(main))
