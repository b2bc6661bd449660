"""Which library multiplies, decided once per machine: by rule where the processor leaves no doubt, else by a short measurement.

The measurement must not depend on what else the machine does. It runs on one thread and counts that thread's own CPU time; the
candidates take turns; and another product takes torch's place only if it was clearly faster in most of the turns, so that close
races always have the same outcome.

The result is a file in the user's cache (`~/.cache/megatron_dmtd/products/`), under a digest of the processor and of torch: all
processes of this machine, and all later ones, choose alike. A run keeps a copy next to its checkpoints and follows that, so that
it repeats its bits when it is resumed. `tools/bench/machine.py` prints the choices. Where the cache cannot be written, each
process measures for itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from megatron_dmtd.infra.files import write_atomically
from megatron_dmtd.infra.json_files import parse_object
from megatron_dmtd.infra.locks import FileLock
from megatron_dmtd.infra.native import cpu_facts, user_cache

#: Of this file's content: another number makes a new file.
VERSION = 1
#: Width of the square weights that are measured: larger than a core's cache in fp32.
WIDTH = 768
#: Rows that are measured; a product of other rows is decided by the nearest ones, by ratio.
ROWS = (16, 96, 512)
TURNS = 11
#: Another product must take less than this fraction of torch's time, in three quarters of the turns.
CLEARLY_FASTER = 0.96


class Form(enum.StrEnum):
    """Which of a linear layer's three products."""

    FORWARD = "forward"
    INPUT_GRAD = "input gradient"
    WEIGHT_GRAD = "weight gradient"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One decision, with what it follows from."""

    dtype: str
    form: Form
    rows: int
    product: str
    gflops: Mapping[str, float]
    """Median rate of each candidate on one thread, by name; empty if there was nothing to choose from."""


class Choices:
    """The decisions for one machine."""

    def __init__(self, choices: tuple[Choice, ...], *, path: Path | None = None) -> None:
        """`path`: the file that holds them, if any."""
        self.all, self.path = choices, path
        self._names = {(choice.dtype, choice.form, choice.rows): choice.product for choice in choices}
        self._found: dict[tuple[torch.dtype, Form, int], str] = {}

    def name(self, dtype: torch.dtype, form: Form, rows: int) -> str:
        """Name of the product for a type, a form and a number of rows."""
        key = (dtype, form, rows)
        if key not in self._found:
            self._found[key] = self._names[_word(dtype), form, nearest_rows(rows)]
        return self._found[key]

    def __str__(self) -> str:
        """A line per decision."""
        lines = [f"{'type':9} {'product':16} {'rows':>5}  {'chosen':8}  GFLOP/s on one thread"]
        for choice in self.all:
            rates = ", ".join(f"{name} {rate:.0f}" for name, rate in choice.gflops.items()) or "the only one"
            lines.append(f"{choice.dtype:9} {choice.form:16} {choice.rows:5}  {choice.product:8}  {rates}")
        return "\n".join(lines)


def nearest_rows(rows: int) -> int:
    """The measured number of rows that decides for `rows`."""
    return min(ROWS, key=lambda measured: max(measured / max(rows, 1), rows / measured))


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


#: What else changes how fast the libraries are: limits of instruction sets.
LIMITS = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


class Product(Protocol):
    """A function that multiplies."""

    def __call__(self, x: torch.Tensor, weight_OE: torch.Tensor, bias_O: torch.Tensor | None = None, /) -> torch.Tensor:
        """`x @ weight.T + bias` for `x` of shape `[..., E]`, of any strides."""


def record_path() -> Path:
    """The file with the choices of this machine, of this torch, under these limits."""
    digest = hashlib.sha256()
    versions = (torch.__version__, torch.backends.cpu.get_cpu_capability(), str(torch.backends.mkldnn.is_available()))
    limits = (f"{name}={os.environ.get(name, '')}" for name in LIMITS)
    for fact in (str(VERSION), *versions, *limits, *cpu_facts()):
        digest.update(fact.encode() + b"\0")
    return user_cache().parent / "products" / f"{digest.hexdigest()[:32]}.json"


def recorded(path: Path) -> Choices | None:
    """The choices in a file; none if it is absent or not what `record` writes."""
    try:
        fields = parse_object(path.read_text(encoding="utf-8"))["choices"]
        choices = tuple(Choice(**{**choice, "form": Form(choice["form"])}) for choice in fields)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    wanted = {(_word(dtype), form, rows) for dtype in (torch.float32, torch.bfloat16) for form in Form for rows in ROWS}
    complete = {(choice.dtype, choice.form, choice.rows) for choice in choices} == wanted
    return Choices(choices, path=path) if complete else None


def choose(candidates: Callable[[torch.dtype], Mapping[str, Product]], path: Path, run_folder: Path | None = None) -> Choices:
    """The recorded choices, measured and recorded first if there are none. Processes that start together measure once.

    A run that keeps a copy in a folder of its own follows it, so that it can be resumed when the cache has been emptied or
    measured again. The copy has the machine's name: ranks on other machines, and later ones, keep their own next to it.
    """
    copy = run_folder / path.name if run_folder else None
    if copy is not None and (found := recorded(copy)):
        return found
    choices = _of_the_machine(candidates, path)
    if copy is not None:
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(copy, _text(choices))
    return choices


def _text(choices: Choices) -> str:
    fields = {
        "torch": torch.__version__,
        "processor": list(cpu_facts())[:1],
        "choices": [dataclasses.asdict(choice) for choice in choices.all],
    }
    return json.dumps(fields, indent=1) + "\n"


def _of_the_machine(candidates: Callable[[torch.dtype], Mapping[str, Product]], path: Path) -> Choices:
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(path.with_suffix(".lock"))).acquire()
        except OSError:
            return recorded(path) or Choices(measured(candidates))
        if found := recorded(path):
            return found
        choices = Choices(measured(candidates), path=path)
        try:
            write_atomically(path, _text(choices))
        except OSError:
            return Choices(choices.all)
        return choices


def measured(candidates: Callable[[torch.dtype], Mapping[str, Product]]) -> tuple[Choice, ...]:
    """A decision for each type, form and number of rows."""
    # A caller may be in a mode that changes what operators do, such as fake tensors, which cost nothing to multiply.
    with _one_thread(), torch.no_grad(), _disable_current_modes():
        return tuple(
            _measured(candidates(dtype), dtype, form, rows)
            for dtype in (torch.float32, torch.bfloat16)
            for form in Form
            for rows in ROWS
        )


def _measured(candidates: Mapping[str, Product], dtype: torch.dtype, form: Form, rows: int) -> Choice:
    if len(candidates) == 1:
        return Choice(dtype=_word(dtype), form=form, rows=rows, product=next(iter(candidates)), gflops={})
    x, weight = _operands(dtype, form, rows)
    seconds = _times(candidates, x, weight)
    gflops = {name: round(2e-9 * rows * WIDTH**2 / statistics.median(times), 1) for name, times in seconds.items()}
    return Choice(dtype=_word(dtype), form=form, rows=rows, product=fastest(seconds), gflops=gflops)


def _operands(dtype: torch.dtype, form: Form, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Strided as the form has them."""
    generator = torch.Generator().manual_seed(0)
    x, grad, weight = (torch.randn(size, WIDTH, generator=generator).to(dtype) for size in (rows, rows, WIDTH))
    match form:
        case Form.FORWARD:
            return x, weight
        case Form.INPUT_GRAD:
            return grad, weight.t()
        case Form.WEIGHT_GRAD:
            return grad.t(), x.t()


def _times(candidates: Mapping[str, Product], x: torch.Tensor, weight: torch.Tensor) -> dict[str, list[float]]:
    """CPU seconds of each candidate in each turn."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(TURNS + 1):
        for name, one in candidates.items():
            taken = _seconds(one, x, weight)
            if turn:  # the first call prepares its kernel
                seconds[name].append(taken)
    return seconds


def _seconds(one: Product, x: torch.Tensor, weight: torch.Tensor) -> float:
    started = time.thread_time()
    one(x, weight)
    return time.thread_time() - started


def fastest(seconds: Mapping[str, Sequence[float]]) -> str:
    """The candidate to use: the first, unless another was clearly faster in three quarters of the turns."""
    first, *others = seconds
    limits = {name: sorted(mine / its for mine, its in zip(seconds[name], seconds[first])) for name in others}
    clear = {
        name: ratios[(3 * len(ratios)) // 4] for name, ratios in limits.items() if ratios[(3 * len(ratios)) // 4] < CLEARLY_FASTER
    }
    return min(clear, key=lambda name: clear[name], default=first)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """A process that may still fork must not start threads; and a thread's CPU time is only what it computes itself."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
