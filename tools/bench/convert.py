#!/usr/bin/env python3
"""Speed and memory of conversions at two sizes, against `cp` of the same files in the same run.

    python tools/bench/convert.py --scratch /tmp --output convert.json

Makes models of random weights in bf16, the second of twice as many layers, imports and exports each in a process of its own, and
copies the same files with `cp`. Every figure includes flushing to the disk. Memory is the peak of the process above what it holds
before the conversion begins (interpreter, torch, transformers). Each pair is checked: the export equals the source bit for bit.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_dmtd.config import CycleConfig, ModelConfig
from megatron_dmtd.config.decoder import decoder_of
from megatron_dmtd.infra.console import ending_quietly

_CONVERSIONS = ("import", "export")


def _model(arguments: argparse.Namespace, num_layers: int) -> ModelConfig:
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=arguments.hidden_size,
        intermediate_size=arguments.intermediate_size,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        vocab_size=arguments.vocab_size,
    )


def make_directory(directory: Path, model: ModelConfig) -> None:
    """A Hugging Face directory of random bf16 weights, one tensor in memory at a time."""
    import torch

    from megatron_dmtd.conversion.hf_directory import write_hf_directory
    from megatron_dmtd.families import ModelDescription, write_fields
    from megatron_dmtd.weights.megatron_names import rules
    from megatron_dmtd.weights.specs import TensorSpec

    specs = {name: TensorSpec(shape, torch.bfloat16) for rule in rules(decoder_of(model)) for name, shape in rule.hf}
    generator = torch.Generator().manual_seed(0)
    tensors = ((name, torch.empty(spec.shape, dtype=spec.dtype).normal_(generator=generator)) for name, spec in specs.items())
    fields = write_fields(ModelDescription(model=model, cycle=CycleConfig(variant="vanilla")))
    write_hf_directory(directory, fields=fields, specs=specs, tensors=tensors)


def _memory_bytes(field: str) -> int:
    """A field of this process's status. `ru_maxrss` would not do: a child inherits the peak of its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def convert_here(kind: str, source: str, target: str) -> dict[str, float]:
    """Seconds and bytes above the start of one conversion. Runs in a process of its own, on Linux."""
    from megatron_dmtd.conversion.convert import export_hf, import_hf

    convert = {"import": import_hf, "export": export_hf}[kind]
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, start = _memory_bytes("VmRSS"), time.perf_counter()
    convert(source, target)
    return {"seconds": time.perf_counter() - start, "peak_bytes": _memory_bytes("VmHWM") - before}


def _convert(kind: str, source: Path, target: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--convert", kind, str(source), str(target)]
    paths = os.pathsep.join(path for path in sys.path if path)  # what this process can import
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths})
    return json.loads(done.stdout.splitlines()[-1])


def _copy(source: Path, target: Path) -> float:
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for path in target.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - start


def _measure(folder: Path, model: ModelConfig, *, repeats: int) -> dict[str, Any]:
    """Each conversion follows a copy that is removed again: a change of the machine's load meets both, and both find as much
    memory that was in use a moment ago, which a virtual machine gives out faster than other memory.
    """
    from megatron_dmtd.conversion.compare import compare
    from megatron_dmtd.conversion.sources import open_source

    source = folder / "source"
    make_directory(source, model)
    runs: dict[str, list[Any]] = {kind: [] for kind in _CONVERSIONS}
    for _ in range(repeats):
        for kind, origin, target in (("import", source, folder / "start"), ("export", folder / "start", folder / "out")):
            cp_s = _copy(source, folder / "copy")
            shutil.rmtree(folder / "copy")
            runs[kind].append(_convert(kind, origin, target) | {"cp_s": cp_s})
        comparison = compare(open_source(source), open_source(folder / "out"))
        assert comparison.is_equal and comparison.num_equal > 0, comparison
        for name in ("start", "out"):
            shutil.rmtree(folder / name)
    largest = max(spec.dtype.itemsize * math.prod(spec.shape) for spec in open_source(source).stored.values())
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    shutil.rmtree(source)
    cp = statistics.median(run["cp_s"] for kind in _CONVERSIONS for run in runs[kind])
    fastest_cp = min(run["cp_s"] for kind in _CONVERSIONS for run in runs[kind])
    result: dict[str, Any] = {"num_layers": model.num_layers, "bytes": size, "largest_tensor_bytes": largest, "cp_s": cp}
    for kind in _CONVERSIONS:
        seconds = statistics.median(run["seconds"] for run in runs[kind])
        peak = max(run["peak_bytes"] for run in runs[kind])
        times_cp = statistics.median(run["seconds"] / run["cp_s"] for run in runs[kind])
        fastest = min(run["seconds"] for run in runs[kind]) / fastest_cp
        result[kind] = {
            "seconds": seconds,
            "times_cp": times_cp,
            "fastest_times_cp": fastest,
            "peak_bytes": peak,
            "peak_over_largest": peak / largest,
        }
    return result


def _report(result: dict[str, Any]) -> str:
    size, largest, cp = result["bytes"] / 1e9, result["largest_tensor_bytes"] / 1e6, result["cp_s"]
    lines = [
        f"{result['num_layers']} layers, {size:.2f} GB, largest tensor {largest:.0f} MB; cp {cp:.2f} s ({size / cp:.2f} GB/s)",
    ]
    for kind in _CONVERSIONS:
        one = result[kind]
        lines.append(
            f"  {kind}: {one['seconds']:.2f} s, {one['times_cp']:.2f} x cp (fastest by fastest {one['fastest_times_cp']:.2f}); "
            f"peak {one['peak_bytes'] / 1e6:.0f} MB, "
            f"{one['peak_over_largest']:.2f} x the largest tensor"
        )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--scratch", help="folder for the models; needs four times the larger one's size")
    parser.add_argument("--output", help="JSON file to write")
    parser.add_argument("--num-layers", type=int, default=12, help="of the smaller model")
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--intermediate-size", type=int, default=6144)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=151936)
    parser.add_argument("--repeats", type=int, default=3, help="the median of this many is reported")
    parser.add_argument("--convert", nargs=3, metavar=("KIND", "SOURCE", "TARGET"), help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line per size and conversion. Exit status 0."""
    arguments = _parser().parse_args(argv)
    if arguments.convert:
        print(json.dumps(convert_here(*arguments.convert)))
        return 0
    results = []
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        for num_layers in (arguments.num_layers, 2 * arguments.num_layers):
            results.append(_measure(Path(folder), _model(arguments, num_layers), repeats=arguments.repeats))
            print(_report(results[-1]), flush=True)
    if arguments.output:
        machine = {"machine": platform.platform(), "cpus": os.cpu_count(), "torch": importlib.metadata.version("torch")}
        Path(arguments.output).write_text(json.dumps(machine | {"results": results}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
