#!/usr/bin/env python3
"""Submit a job of examples/slurm with a site's settings, or show what would be submitted and what it would cost.

    python tools/launch.py examples/slurm/train-qwen3-4b-4-nodes.sbatch --dry-run
    python tools/launch.py examples/slurm/train-cpu.sbatch --sbatch=--time=02:00:00 -- --training.steps 100
    python tools/launch.py examples/slurm/convert.sbatch --dependency afterok:1234 --replace-options -- export runs/mine exported

Prints the job's number. Arguments after -- are added to the options of the job's tool. Whatever can be refused is refused before
anything is submitted. Exit status: 0 submitted or shown, 2 refused.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_dmtd.config import make_parser, parse
from megatron_dmtd.errors import DMTDError
from megatron_dmtd.infra.console import ending_quietly
from megatron_dmtd.launch.cost import estimate
from megatron_dmtd.launch.inputs import check_training
from megatron_dmtd.launch.job import Job, read_job
from megatron_dmtd.launch.site import Site, read_site
from megatron_dmtd.launch.submit import require_acceptance, submit
from megatron_dmtd.training.checkpoints.initial import run_config
from megatron_dmtd.training.plan import Plan, describe, make_plan, require_memory

_TOOLS_WITH_CHECKS = ("preprocess", "convert", "evaluate", "serve")
_SITE_FILE = Path(__file__).parents[1] / "examples" / "slurm" / "site.env"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("script", help="one of examples/slurm/*.sbatch, or a similar script")
    add("--site", default=str(_SITE_FILE), help="the site file (default: examples/slurm/site.env)")
    add("--dry-run", action="store_true", help="print the script, the layout and the cost; submit nothing")
    add("--check", action="store_true", help="refuse what cannot run or lacks its inputs; submit nothing")
    add("--sbatch", action="append", default=[], metavar="--NAME=VALUE", help="an additional sbatch option; may be repeated")
    add("--dependency", default="", help="when the job may start, for example afterok:1234; inputs may then come later")
    add("--replace-options", action="store_true", help="arguments after -- replace the options in the script")
    return parser


def _plan(job: Job, site: Site) -> Plan | None:
    """The plan of a training job; refuses what cannot run."""
    if not job.is_training:
        return None
    parser = make_parser(description="")
    config = run_config(parser, parse(parser, job.options), job.options)
    plan = make_plan(config, world_size=job.num_ranks, on_gpu=job.uses_gpus)
    if job.uses_gpus and site.gpu_memory_gib:
        require_memory(plan, device_gib=site.gpu_memory_gib)
    return plan


def _check_inputs(job: Job, plan: Plan | None, *, come_later: bool) -> None:
    """Refuse a job that would wait for hours and then be refused by its tool."""
    if plan is not None:
        check_training(plan.config, inputs_come_later=come_later)
    elif job.tool in _TOOLS_WITH_CHECKS:
        _tool(job.tool).check_inputs(job.options, come_later=come_later)


def _tool(name: str) -> Any:
    """The module of a command of this folder, which is no package."""
    spec = importlib.util.spec_from_file_location(f"tools_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None, name
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _show(job: Job, site: Site, plan: Plan | None) -> str:
    cost = estimate(job, site, plan)
    layout = f"\n--- layout\n{describe(plan)}\n" if plan is not None else ""
    return (
        f"--- script\n{job.text}{layout}\n--- cost\n"
        f"{cost.node_hours:,.2f} node hours, {cost.hours:,.2f} hours on {job.num_nodes} node(s): {cost.basis}"
    )


def _handle(job: Job, site: Site, parsed: argparse.Namespace) -> None:
    """Show, check or submit a job, as the command line says. Raises `DMTDError`."""
    plan = _plan(job, site)
    if parsed.dry_run:
        print(_show(job, site, plan))
    try:
        _check_inputs(job, plan, come_later=bool(parsed.dependency))
    except DMTDError as error:
        if not parsed.dry_run:
            raise
        print(f"\n--- not ready to be submitted\n{error}")
    if parsed.dry_run or parsed.check:
        return
    print(require_acceptance(job), file=sys.stderr)
    print(submit(job, site, dependency=parsed.dependency))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    cut = words.index("--") if "--" in words else len(words)
    parsed = _parser().parse_args(words[:cut])
    try:
        site = read_site(parsed.site)
        job = read_job(parsed.script, site, sbatch=parsed.sbatch, options=words[cut + 1 :], replaces=parsed.replace_options)
        with contextlib.chdir(site.work_dir):  # where jobs run: relative paths mean the same to us
            _handle(job, site, parsed)
    except DMTDError as error:
        print(f"{type(error).__name__}\n{error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
