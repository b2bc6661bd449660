#!/usr/bin/env python3
"""Record what a source tree computes, bit for bit, and compare another tree with it: to show that a rewrite changes no number.

    python tools/digests.py record --tree ../before --output before.json
    python tools/digests.py compare before.json
    python tools/digests.py compare before.json --only plans masks engine/causal-refresh train/vanilla/tp2
    python tools/digests.py compare before.json --with after.json

Sections (what `--only` selects, whole or by the beginning of a name):
  plans    tools/plan.py on every recipe of examples/, in several layouts
  masks    tools/inspect_mask.py for every variant
  train    ten steps per variant and layout: losses, gradient norms, learning rates, every tensor of the checkpoint
  exports  tools/convert.py: exported directories, imports of them, and what transformers computes from them
  engine   tokens, log probabilities and scores: every kind, native and torch kernels, cached prefixes, sampling
  hf       logits, loss, gradients and generated tokens of this project's model code for transformers

A tree is driven through its public surface only; nothing but the tree is needed. What a rewrite renames on purpose goes into
ITEM_RENAMES here and OPTION_RENAMES in digests_measured/tree.py. Numbers of kernels depend on the machine, so all sections but
plans and masks are refused on a machine other than the one that recorded them. Everything runs on the CPU, on one thread, and MKL
is told to give the same bits wherever a tensor lies in memory.

Exit status: 0 recorded, or all equal; 1 something differs; 2 refused, or a command of the tree failed while recording.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType

from megatron_dmtd.errors import ConfigError, DataError, DMTDError
from megatron_dmtd.infra.console import ending_quietly

HERE = Path(__file__).resolve().parent
SECTIONS = ("plans", "masks", "train", "exports", "engine", "hf")
#: What depends on no kernel, and so on no machine.
EXACT_SECTIONS = ("plans", "masks")
FORMAT = 1
#: (pattern, replacement) for names of recorded items that a later tree has renamed on purpose.
ITEM_RENAMES: tuple[tuple[str, str], ...] = ()
#: Set for the process that measures and all that it starts.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Otherwise MKL sums rows in an order that depends on where they lie in memory, and any rewrite moves them.
    "MKL_CBWR": "AVX2,STRICT",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONSAFEPATH": "1",
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What one tree computed on one machine."""

    machine: dict[str, str]
    commit: str
    """For the reader; nothing depends on it."""
    only: list[str]
    """What was selected; empty: everything."""
    seconds: dict[str, float]
    """Time of each section."""
    items: dict[str, str]
    """Figures by name, in the order in which they were measured."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One item with two figures; None where one side lacks it."""

    name: str
    recorded: str | None
    found: str | None


# Files.


def read_record(path: Path) -> Record:
    """The record in a file. Raises `DataError` if it is none."""
    try:
        fields = json.loads(path.read_text())
        if fields.pop("format") != FORMAT:
            raise ValueError("another format")
        return Record(**fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            found=f"{path}: {type(error).__name__}: {error}",
            required=f"a file of format {FORMAT} that `digests.py record` wrote",
            remedy="check the path, or record the old tree again",
        ) from error


def write_record(path: Path, record: Record) -> None:
    """Write a record, whole or not at all."""
    fields = {"format": FORMAT} | {name: getattr(record, name) for name in Record.__slots__}
    unfinished = path.with_name(path.name + ".partial")
    unfinished.write_text(json.dumps(fields, indent=1) + "\n")
    unfinished.replace(path)


# Comparison.


def is_selected(name: str, selection: Sequence[str]) -> bool:
    """Whether a name begins with one of the selected names, by whole parts. An empty selection selects everything."""
    return not selection or any(f"{name}/".startswith(f"{chosen.rstrip('/')}/") for chosen in selection)


def must_run(case: str, selection: Sequence[str]) -> bool:
    """Whether a case gives any selected item."""
    return is_selected(case, selection) or any(is_selected(chosen, [case]) for chosen in selection)


def renamed(items: dict[str, str], renames: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The same figures under the names of a later tree. Raises `ConfigError` if two items get one name."""
    found: dict[str, str] = {}
    for old, figure in items.items():
        new = old
        for pattern, replacement in renames:
            new = re.sub(pattern, replacement, new)
        if new in found:
            raise ConfigError(
                found=f"two recorded items that ITEM_RENAMES calls {new}", required="one name each", remedy="correct ITEM_RENAMES"
            )
        found[new] = figure
    return found


def differences(recorded: dict[str, str], found: dict[str, str]) -> list[Difference]:
    """All that two sets of items differ in: in the order of the recorded ones, then what is new."""
    names = [*recorded, *(name for name in found if name not in recorded)]
    pairs = (Difference(name, recorded.get(name), found.get(name)) for name in names)
    return [pair for pair in pairs if pair.recorded != pair.found]


def check_machines(recorded: Record, found: dict[str, str], sections: Sequence[str]) -> None:
    """Accept a comparison of some sections, or raise `ConfigError`: numbers of kernels are compared on one machine only."""
    numeric = [name for name in sections if name not in EXACT_SECTIONS]
    names = sorted(recorded.machine.keys() | found.keys())
    pairs = [(name, recorded.machine.get(name), found.get(name)) for name in names]
    unlike = [_unlike(*pair) for pair in pairs if pair[1] != pair[2]]
    if numeric and unlike:
        raise ConfigError(
            found=f"{', '.join(numeric)} recorded on another machine: " + "; ".join(unlike),
            required="the same processor and libraries: kernels of others round differently",
            remedy=f"record the old tree on this machine, or compare with --only {' '.join(EXACT_SECTIONS)}",
        )


def _unlike(name: str, recorded: str | None, found: str | None) -> str:
    if name == "flags" and recorded is not None and found is not None:
        gone, new = set(recorded.split()) - set(found.split()), set(found.split()) - set(recorded.split())
        return f"flags: without {' '.join(sorted(gone)) or 'none'}, with {' '.join(sorted(new)) or 'none'} in addition"
    return f"{name} {recorded} there, {found} here"


def sections_of(items: dict[str, str]) -> list[str]:
    """The sections that items belong to, in order."""
    return list(dict.fromkeys(name.split("/")[0] for name in items))


def report(recorded: dict[str, str], found: dict[str, str], *, show: int) -> tuple[list[str], bool]:
    """What to print about a comparison, section by section, and whether all is equal."""
    lines, all_equal = [], True
    for section in sections_of(recorded | found):
        ours, theirs = ({name: items[name] for name in items if is_selected(name, [section])} for items in (recorded, found))
        unequal = differences(ours, theirs)
        count = len(ours | theirs)
        all_equal = all_equal and not unequal
        if not unequal:
            lines.append(f"{section:8} {count} items, all equal")
            continue
        lines.append(f"{section:8} {count} items, {len(unequal)} differ, the first: {unequal[0].name}")
        for difference in unequal[:show]:
            lines += [
                f"  {difference.name}",
                f"    recorded  {'nothing' if difference.recorded is None else difference.recorded}",
                f"    now       {'nothing' if difference.found is None else difference.found}",
            ]
    return lines, all_equal


# Measuring.


def machine() -> dict[str, str]:
    """All that the kernels' numbers depend on, apart from the tree."""
    cpu = Path("/proc/cpuinfo")
    fields = dict(re.findall(r"^(model name|flags)\s*: (.*)$", cpu.read_text() if cpu.is_file() else "", re.MULTILINE))
    compiler = next((path for name in ("cc", "gcc") if (path := shutil.which(name))), None)
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout if compiler else "none"
    found = {
        "cpu": fields.get("model name", platform.processor() or platform.machine()),
        "flags": " ".join(sorted(fields.get("flags", "").split())),
        "python": platform.python_version(),
        "compiler": version.partition("\n")[0],
    }
    return found | {name: metadata.version(name) for name in ("torch", "megatron-core", "transformers", "safetensors", "numpy")}


def commit_of(tree: Path) -> str:
    """The commit of a tree, and whether files differ from it; "unknown" outside git."""
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def measured_module() -> ModuleType:
    """What is measured: the folder next to this file, whichever tree the package comes from."""
    spec = importlib.util.spec_from_file_location("digests_measured", HERE / "digests_measured" / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def environment_of(tree: Path) -> dict[str, str]:
    """Environment in which a tree is measured."""
    return ENVIRONMENT | {"PYTHONPATH": str(tree)}


def require_tree(tree: Path) -> None:
    """Accept a tree to measure, or raise `ConfigError`."""
    missing = [name for name in ("megatron_dmtd/__init__.py", "tools/train.py", "examples") if not (tree / name).exists()]
    if missing:
        raise ConfigError(
            found=f"{tree} without {', '.join(missing)}", required="the root of a source tree", remedy="check --tree"
        )


def enter(tree: Path, arguments: Sequence[str]) -> None:
    """Start this command again in the environment in which the tree is measured, unless it already runs there."""
    wanted = environment_of(tree)
    if {name: os.environ.get(name) for name in wanted} != wanted:
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, __file__, *arguments], {**os.environ, **wanted})
    import megatron_dmtd

    package = Path(megatron_dmtd.__file__).resolve()
    if not package.is_relative_to(tree):
        raise ConfigError(found=f"the package of {package.parent}", required=f"that of {tree}", remedy="check PYTHONPATH")


def require_cases(names: Sequence[str], selection: Sequence[str]) -> None:
    """Accept a selection, or raise `ConfigError` naming what it selects nothing with."""
    useless = [chosen for chosen in selection if not any(must_run(name, [chosen]) for name in names)]
    if useless:
        near = [name for name in names if name.split("/")[0] == useless[0].split("/")[0]][:5]
        raise ConfigError(
            found=f"--only {' '.join(useless)}, which nothing is called",
            required=f"sections ({', '.join(SECTIONS)}) or beginnings of names, such as {', '.join(near) or names[0]}",
            remedy="correct --only",
        )


def measure(tree: Path, selection: Sequence[str]) -> tuple[Record, list[str]]:
    """Run the selected cases of a tree. Returns the record, and the names of cases whose commands failed."""
    measured = measured_module()
    cases = [(name, run) for name, run in measured.cases() if must_run(name, selection)]
    require_cases([name for name, _ in measured.cases()], selection)
    items: dict[str, str] = {}
    seconds: dict[str, float] = {}
    failed = []
    _say(f"measuring {tree} ({commit_of(tree)}): {len(cases)} cases")
    if {name.split("/")[0] for name, _ in cases} - set(EXACT_SECTIONS):
        measured.preload()
    with tempfile.TemporaryDirectory(prefix="digests-") as scratch:
        bench = measured.Tree(tree, Path(scratch))
        for index, (name, run) in enumerate(cases, start=1):
            started = time.monotonic()
            try:
                own = measured.under(name, run(bench))
            except measured.MeasureError as error:
                _say(f"{name} failed: {error}")
                failed.append(name)
                own = {}
            items |= {item: figure for item, figure in own.items() if is_selected(item, selection)}
            took = time.monotonic() - started
            section = name.split("/")[0]
            seconds[section] = round(seconds.get(section, 0.0) + took, 1)
            _say(f"[{index}/{len(cases)}] {name}: {len(own)} items, {took:.1f} s")
    record = Record(machine=machine(), commit=commit_of(tree), only=list(selection), seconds=seconds, items=items)
    return record, failed


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# The command.


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="measure a tree and write what it computes", allow_abbrev=False)
    recording.add_argument("--output", type=Path, required=True, help="file to write")
    comparing = commands.add_parser("compare", help="measure a tree, or read another record, and compare", allow_abbrev=False)
    comparing.add_argument("recorded", type=Path, help="file of an earlier `record`")
    comparing.add_argument("--with", dest="other", type=Path, help="a second record, instead of measuring a tree")
    comparing.add_argument("--show", type=int, default=1, help="differences to show per section (default: %(default)s)")
    for command in (recording, comparing):
        command.add_argument("--tree", type=Path, default=HERE.parent, help="root of the tree to measure (default: this one)")
        command.add_argument(
            "--only",
            nargs="+",
            default=[],
            metavar="NAME",
            help="sections, or beginnings of names",
        )
    return parser


def _record(options: argparse.Namespace) -> int:
    record, failed = measure(options.tree, options.only)
    if failed:
        _say(f"nothing recorded: {len(failed)} cases failed, {', '.join(failed)}")
        return 2
    write_record(options.output, record)
    print(f"{len(record.items)} items of {record.commit} in {options.output}")
    print("seconds: " + ", ".join(f"{name} {seconds:.0f}" for name, seconds in record.seconds.items()))
    return 0


def _compare(options: argparse.Namespace, recorded: Record) -> int:
    failed: list[str] = []
    only = options.only or recorded.only
    if options.other:
        found = read_record(options.other)
    else:
        check_machines(recorded, machine(), [name for name in SECTIONS if must_run(name, only)])
        found, failed = measure(options.tree, only)
    items, new = (
        {name: figure for name, figure in some.items() if is_selected(name, only)}
        for some in (renamed(recorded.items, ITEM_RENAMES), found.items)
    )
    if not items:
        raise ConfigError(found=f"nothing of that in {options.recorded}", required="a recorded section", remedy="correct --only")
    check_machines(recorded, found.machine, sections_of(items | new))
    lines, all_equal = report(items, new, show=options.show)
    print(f"recorded: {recorded.commit}; now: {found.commit}", *lines, sep="\n")
    if failed:
        print(f"{len(failed)} cases could not be measured: {', '.join(failed)}")
    return 0 if all_equal and not failed else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 recorded or equal, 1 different, 2 refused."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    options.tree = options.tree.resolve()
    try:
        recorded = read_record(options.recorded) if options.command == "compare" else None
        if recorded is None and options.output.exists():
            raise ConfigError(found=f"{options.output} exists", required="a new file", remedy="name another, or remove it first")
        if recorded is None or not options.other:
            require_tree(options.tree)
            enter(options.tree, arguments)
        return _record(options) if recorded is None else _compare(options, recorded)
    except DMTDError as error:
        print(f"{type(error).__name__}\n{error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
