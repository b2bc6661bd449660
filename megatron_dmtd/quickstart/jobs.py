"""The parts of the quickstart, in order."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from megatron_dmtd.conversion.convert import export_hf
from megatron_dmtd.infra.files import write_atomically
from megatron_dmtd.platform import Platform, current_platform
from megatron_dmtd.quickstart.decode import decode_all
from megatron_dmtd.quickstart.large import measure
from megatron_dmtd.quickstart.parts import Part, Parts, alone_in, progress_bar, redraw, run_command
from megatron_dmtd.quickstart.plan import DMTD, MODELS, STORIES, TRAININGS, Machine, Plan
from megatron_dmtd.quickstart.report import write_report
from megatron_dmtd.quickstart.stories import write_stories
from megatron_dmtd.training.checkpoints.run_lock import wait_until_free
from megatron_dmtd.training.log import METRICS_FILE, read_metrics

#: ranks of a quickstart that was killed save and stop; on a busy machine that takes its time
_ORPHANS_S = 90.0


def this_machine() -> tuple[Machine, Platform]:
    """The hardware of this machine."""
    platform = current_platform()
    num_gpus = torch.accelerator.device_count() if platform.is_cuda else 0
    return Machine(num_gpus=num_gpus, num_cores=len(os.sched_getaffinity(0))), platform


def _last_line(log: Path) -> str:
    """The last line of a command's output, including the state of its own progress bar."""
    lines = re.split(r"[\r\n]+", log.read_text(errors="replace")[-2000:].strip())
    return lines[-1].strip()[:100]


def _run_tool(plan: Plan, name: str, options: Sequence[str]) -> None:
    """Run a command of tools/ with its output in DIR/data/NAME.log, showing the elapsed time and its last line."""
    log = plan.directory / "data" / f"{name}.log"
    log.unlink(missing_ok=True)
    with progress_bar(total=None, desc=f"  {name}", bar_format="{desc}: {elapsed} {postfix}") as bar:

        def watch() -> None:
            bar.set_postfix_str(_last_line(log), refresh=False)
            redraw(bar)

        command = [sys.executable, f"tools/{name}.py", "--input", *plan.sources, *options]
        run_command(command, log=log, cwd=plan.root, environment=os.environ, watch=watch)


def _write_stories(plan: Plan) -> None:
    write_stories(plan.stories_file, count=plan.stories)


def _measure_large(plan: Plan, platform: Platform) -> None:
    """In a process of this number of threads, with all cores at work."""
    torch.set_num_threads(plan.machine.num_cores)
    found = measure(plan, platform)
    write_atomically(plan.large_file, json.dumps(found, indent=2) + "\n")


def _train_tokenizer(plan: Plan) -> None:
    """Train the tokenizer for the recipes' vocabulary; if a small corpus gives fewer tokens, the remaining rows stay unused."""
    size = plan.config(DMTD).model.vocab_size
    options = ["--vocab-size", str(size), "--heldout-fraction", str(plan.heldout_fraction)]
    _run_tool(plan, "train_tokenizer", [*options, "--output", str(plan.tokenizer), "--overwrite"])


def _preprocess(plan: Plan) -> None:
    prefix = plan.train_prefix.removesuffix("-train")
    options = ["--tokenizer", str(plan.tokenizer), "--heldout-fraction", str(plan.heldout_fraction)]
    _run_tool(plan, "preprocess", [*options, "--output", prefix, "--overwrite"])


def _watcher(metrics: Path, bar: tqdm) -> Callable[[], None]:
    """Moves `bar` to the last step recorded in `metrics`."""

    def watch() -> None:
        records = [record for record in read_metrics(metrics) if "loss" in record] if metrics.is_file() else []
        if records:
            bar.set_postfix(loss=f"{records[-1]['loss']:.3f}", refresh=False)
            bar.update(records[-1]["step"] - bar.n)
        redraw(bar)

    return watch


def _train(plan: Plan, model: str) -> None:
    run = plan.run_directory(model)
    steps = plan.config(model).training.steps
    # Its ranks are told to stop when it is killed, but that takes a moment.
    wait_until_free(run / "checkpoints", timeout_s=_ORPHANS_S, waiting=lambda owner: tqdm.write(f"  waiting for {owner} to stop"))
    with progress_bar(total=steps, unit="step", desc=f"  {model}") as bar:
        run_command(
            plan.train_command(model),
            log=run / "train.log",
            cwd=plan.root,
            environment=plan.train_environment(),
            watch=_watcher(run / METRICS_FILE, bar),
        )


def _export(plan: Plan, model: str) -> None:
    shutil.rmtree(plan.export_directory(model), ignore_errors=True)  # of an earlier try; an export is whole or absent
    export_hf(plan.run_directory(model) / "checkpoints", plan.export_directory(model))


def parts(plan: Plan, platform: Platform) -> list[Part]:
    """Everything but the report."""
    data = plan.data_inputs()
    prefixes = (plan.train_prefix, plan.heldout_prefix)
    tokens = tuple(Path(prefix + suffix) for prefix in prefixes for suffix in (".bin", ".idx", ".json"))
    trainings = [
        Part(
            name=f"train {model}",
            inputs=plan.train_inputs(model),
            outputs=(plan.run_directory(model),),
            work=partial(_train, plan, model),
        )
        for model in TRAININGS
    ]
    exports = [
        Part(
            name=f"export {model}",
            inputs=plan.train_inputs(model),
            outputs=(plan.export_directory(model),),
            work=partial(_export, plan, model),
        )
        for model in MODELS
    ]
    stories = Part(name=STORIES, inputs=plan.stories_inputs(), outputs=(plan.stories_file,), work=partial(_write_stories, plan))
    return [
        *([stories] if STORIES in plan.inputs else []),
        Part(name="tokenizer", inputs=data, outputs=(plan.tokenizer,), work=partial(_train_tokenizer, plan)),
        Part(name="token files", inputs=data, outputs=tokens, work=partial(_preprocess, plan)),
        *trainings,
        *exports,
        Part(
            name="decoding",
            inputs=plan.decoding_inputs(),
            outputs=(plan.decoding_file,),
            work=partial(decode_all, plan, platform, output=plan.decoding_file),
        ),
        Part(
            name="large model",
            inputs=plan.large_inputs(),
            outputs=(plan.large_file,),
            work=partial(_measure_large, plan, platform),
        ),
    ]


def run_quickstart(plan: Plan, platform: Platform, *, say: Callable[[str], None] = print) -> str:
    """Do what is not done yet, write the report, and return its summary. Raises a `DMTDError` for what the user can fix."""
    for model in TRAININGS:
        plan.config(model)  # refuses before any work
    started = time.monotonic()
    with alone_in(plan.directory):
        done = Parts(plan.directory, say=say)
        jobs = parts(plan, platform)
        seconds = {}
        for number, part in enumerate(jobs, start=1):
            say(f"[{number}/{len(jobs)}] {part.name}")
            seconds[part.name] = done.run(part)
        say(f"finished in {time.monotonic() - started:.0f} s")
        return write_report(plan, seconds)
