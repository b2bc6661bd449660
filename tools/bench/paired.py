#!/usr/bin/env python3
"""Run one benchmark of this folder in two source trees, in turns, and compare what they measure: has a rewrite cost speed?

    python tools/bench/paired.py --old ../before -- train_step.py --size 5M --seq-lengths 1024 --threads 2
    python tools/bench/paired.py --old ../before --pairs 9 --figure share_of_bare -- decode.py --batches 1 --contexts 128

Each tree runs its own copy of the benchmark on its own package; a pair is one run of each, and the order alternates, so that a
drift of the machine meets both. The benchmark must take `--json FILE`. Every row of that file that has the figure gives a ratio,
new over old, per pair: above 1 is faster. A row passes if the median of its ratios is at least `--least`.

`tokens_per_s` needs a machine that does nothing else. `share_of_limit` (train_step.py) and `share_of_bare` (decode.py) are
relative to a baseline measured in the same run: they stand more noise, but hide a change that meets the baseline too, such as a
change of the kernel of matrix products. Where the spread of the ratios is wider than the loss to be found, take more pairs.

Exit status: 0 all rows pass, 1 some do not, 2 refused, or a benchmark failed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dmtd.errors import CapabilityError, ConfigError, DMTDError
from megatron_dmtd.infra.console import ending_quietly

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One row of the benchmark over all pairs."""

    label: str
    old: float
    """Median."""
    new: float
    """Median."""
    ratios: tuple[float, ...]
    """New over old, one per pair."""

    @property
    def ratio(self) -> float:
        """Median of the ratios."""
        return statistics.median(self.ratios)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--old", type=Path, required=True, help="root of the tree to compare with")
    parser.add_argument("--new", type=Path, default=HERE.parents[1], help="root of the other tree (default: this one)")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each tree (default: %(default)s)")
    parser.add_argument("--figure", default="tokens_per_s", help="name of the figure; more is better (default: %(default)s)")
    parser.add_argument("--least", type=float, default=0.98, help="smallest ratio that passes (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file to write all ratios to")
    parser.add_argument("benchmark", nargs=argparse.REMAINDER, help="-- NAME.py and its options")
    options = parser.parse_args(argv)
    options.benchmark = options.benchmark[1:] if options.benchmark[:1] == ["--"] else options.benchmark
    return options


def check(options: argparse.Namespace) -> None:
    """Accept the command line, or raise `ConfigError`."""
    if not options.benchmark or options.pairs < 1:
        raise ConfigError(
            found=f"{options.pairs} pairs of {' '.join(options.benchmark) or 'nothing'}",
            required="at least one pair, and after -- the name of a benchmark and its options",
            remedy="see --help",
        )
    for tree in (options.old, options.new):
        path = tree / "tools" / "bench" / options.benchmark[0]
        if not path.is_file():
            raise ConfigError(
                found=f"no {path}", required="the benchmark in both trees", remedy="check --old, --new and the name"
            )


def figures(value: Any, name: str, place: str = "") -> Iterator[tuple[str, float]]:
    """Every figure of that name in a JSON value, each with a label: where it is, and the words and counts next to it."""
    if isinstance(value, Mapping):
        if isinstance(value.get(name), int | float):
            words = [f"{key} {word}" for key, word in value.items() if key != name and type(word) in (str, int)]
            yield ", ".join([*([place] if place else []), *words]), float(value[name])
        for key, inner in value.items():
            yield from figures(inner, name, f"{place}/{key}" if place else key)
    elif isinstance(value, list):
        for inner in value:
            yield from figures(inner, name, place)


def run(tree: Path, benchmark: Sequence[str], name: str) -> dict[str, float]:
    """One run of the benchmark in a tree: its figures by label. Raises `CapabilityError` if it fails or has none."""
    with tempfile.TemporaryDirectory(prefix="paired-") as folder:
        output = Path(folder) / "figures.json"
        command = [sys.executable, f"tools/bench/{benchmark[0]}", *benchmark[1:], "--json", str(output)]
        environment = os.environ | {"PYTHONPATH": str(tree)}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        if done.returncode or not output.is_file():
            raise CapabilityError(
                found=f"{' '.join(command)} in {tree}: exit status {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}",
                required="a benchmark that runs in both trees and takes --json",
                remedy="run it there by itself",
            )
        found = list(figures(json.loads(output.read_text()), name))
    labels = [label for label, _ in found]
    if not found or len(set(labels)) < len(labels):
        raise CapabilityError(
            found=f"{len(found)} figures {name}, {len(set(labels))} of them told apart, from {benchmark[0]} in {tree}",
            required="at least one, and each in a row of its own",
            remedy="choose another --figure",
        )
    return dict(found)


def measure(options: argparse.Namespace) -> list[Comparison]:
    """Run the pairs. Raises `CapabilityError` if a run fails, or if runs do not have the same rows."""
    trees = {"old": options.old.resolve(), "new": options.new.resolve()}
    runs: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
    for pair in range(options.pairs):
        for name in ("old", "new") if pair % 2 == 0 else ("new", "old"):
            print(f"pair {pair + 1} of {options.pairs}: {name}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
            runs[name].append(run(trees[name], options.benchmark, options.figure))
    labels = list(runs["old"][0])
    unlike = sorted({label for found in (*runs["old"], *runs["new"]) for label in found.keys() ^ set(labels)})
    if unlike:
        raise CapabilityError(
            found=f"rows that not every run has: {'; '.join(unlike)}", required="the same rows", remedy="compare them by hand"
        )
    return [
        Comparison(
            label=label,
            old=statistics.median(found[label] for found in runs["old"]),
            new=statistics.median(found[label] for found in runs["new"]),
            ratios=tuple(new[label] / old[label] for old, new in zip(runs["old"], runs["new"], strict=True)),
        )
        for label in labels
    ]


def show(rows: Sequence[Comparison], *, figure: str, least: float) -> None:
    """A line per row, and the verdict."""
    width = max(len(row.label) for row in rows)
    print(f"{figure:{width}}  {'old':>10} {'new':>10} {'ratio':>7}  lowest to highest")
    for row in rows:
        verdict = "" if row.ratio >= least else f"  below {least}"
        spread = f"{min(row.ratios):.3f} to {max(row.ratios):.3f}"
        print(f"{row.label:{width}}  {row.old:10.4g} {row.new:10.4g} {row.ratio:7.3f}  {spread}{verdict}")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 all rows pass, 1 some do not, 2 refused or failed."""
    options = arguments(argv)
    try:
        check(options)
        rows = measure(options)
    except DMTDError as error:
        print(f"{type(error).__name__}\n{error}", file=sys.stderr)
        return 2
    show(rows, figure=options.figure, least=options.least)
    if options.json:
        results = [{"label": row.label, "old": row.old, "new": row.new, "ratios": row.ratios, "ratio": row.ratio} for row in rows]
        fields = {"benchmark": options.benchmark, "figure": options.figure, "least": options.least, "rows": results}
        options.json.write_text(json.dumps(fields, indent=2) + "\n")
    return 0 if all(row.ratio >= options.least for row in rows) else 1


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
