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
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dmtd.config import load_config
from megatron_dmtd.errors import DMTDError
from megatron_dmtd.infra.console import ending_quietly
from megatron_dmtd.launch.cost import estimate
from megatron_dmtd.launch.job import Job, read_job
from megatron_dmtd.launch.site import Site, read_site
from megatron_dmtd.launch.submit import require_acceptance, submit
from megatron_dmtd.training.plan import Plan, describe, make_plan, require_memory

_SITE_FILE = Path(__file__).parents[1] / "examples" / "slurm" / "site.env"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("script", help="one of examples/slurm/*.sbatch, or a similar script")
    add("--site", default=str(_SITE_FILE), help="the site file (default: examples/slurm/site.env)")
    add("--dry-run", action="store_true", help="print the script, the layout and the cost; submit nothing")
    add("--sbatch", action="append", default=[], metavar="--NAME=VALUE", help="an additional sbatch option; may be repeated")
    add("--dependency", default="", help="when the job may start, for example afterok:1234")
    add("--replace-options", action="store_true", help="arguments after -- replace the options in the script")
    return parser


def _plan(job: Job, site: Site) -> Plan | None:
    """The plan of a training job; refuses what cannot run."""
    if not job.is_training:
        return None
    plan = make_plan(load_config(job.options), world_size=job.num_ranks, on_gpu=job.uses_gpus)
    if job.uses_gpus and site.gpu_memory_gib:
        require_memory(plan, device_gib=site.gpu_memory_gib)
    return plan


def _show(job: Job, site: Site, plan: Plan | None) -> str:
    cost = estimate(job, site, plan)
    layout = f"\n--- layout\n{describe(plan)}\n" if plan is not None else ""
    return (
        f"--- script\n{job.text}{layout}\n--- cost\n"
        f"{cost.node_hours:,.2f} node hours, {cost.hours:,.2f} hours on {job.num_nodes} node(s): {cost.basis}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    cut = words.index("--") if "--" in words else len(words)
    parsed = _parser().parse_args(words[:cut])
    try:
        site = read_site(parsed.site)
        job = read_job(parsed.script, site, sbatch=parsed.sbatch, options=words[cut + 1 :], replaces=parsed.replace_options)
        plan = _plan(job, site)
        if parsed.dry_run:
            print(_show(job, site, plan))
            return 0
        print(require_acceptance(job), file=sys.stderr)
        print(submit(job, site, dependency=parsed.dependency))
    except DMTDError as error:
        print(f"{type(error).__name__}\n{error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
