"""Estimate the node hours of a job before it is submitted.

A training job's cost follows from its FLOPs and the share of the peak that the site expects; once the run has logged steps on
as many ranks, from what these took. Any other job is charged its time limit: an upper bound. No torch.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from megatron_dmtd.config.batch_size import full_steps
from megatron_dmtd.launch.job import Job
from megatron_dmtd.launch.restarts import newest_step
from megatron_dmtd.launch.site import Site
from megatron_dmtd.training.log import METRICS_FILE, read_metrics
from megatron_dmtd.training.plan import Plan

#: number of logged steps whose median a measured estimate uses
_LAST_STEPS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """An estimate and its basis."""

    node_hours: float
    hours: float
    """Run time of all attempts together, without time spent in the queue."""
    basis: str


def estimate(job: Job, site: Site, plan: Plan | None) -> Cost:
    """Cost of the remaining work of a job. `plan` is the plan of a training job, None for other jobs."""
    if plan is None:
        hours = job.time_limit_s / 3600
        tasks = f"{job.num_tasks} tasks of " if job.num_tasks > 1 else ""
        basis = f"at most: {tasks}{job.num_nodes} node(s) for the whole time limit"
        return Cost(node_hours=hours * job.num_nodes * job.num_tasks, hours=hours, basis=basis)
    folder = plan.config.checkpoint.dir
    done = newest_step(["--checkpoint.dir", str(Path(site.work_dir, folder))]) if folder else 0
    training = plan.config.training
    remaining = max(0, training.steps - done)
    step_s, how = _full_step_seconds(job, site, plan)
    hours = full_steps(training, done, training.steps) * step_s / 3600
    at_most = "at most " if training.rampup_batch_size else ""
    return Cost(node_hours=hours * job.num_nodes, hours=hours, basis=f"{remaining} steps of {at_most}{step_s:.3g} s ({how})")


def _full_step_seconds(job: Job, site: Site, plan: Plan) -> tuple[float, str]:
    """Time of a step of `global_batch_size` rows, and its basis. Steps of a ramp-up take proportionally less."""
    training, folder = plan.config.training, plan.config.logging.dir
    metrics = Path(site.work_dir, folder, METRICS_FILE) if folder else None
    if metrics is not None and metrics.is_file():
        timed = [record for record in read_metrics(metrics) if "step_time_s" in record][-_LAST_STEPS:]
        times = [record["step_time_s"] / full_steps(training, record["step"] - 1, record["step"]) for record in timed]
        if times:
            return statistics.median(times), f"median of the last {len(times)} logged steps; valid for the same number of ranks"
    peak = site.gpu_peak_tflops if job.uses_gpus else site.cpu_peak_tflops
    flops_per_s = plan.world_size * peak * 1e12 * site.expected_mfu
    return plan.step_flops / flops_per_s, f"{site.expected_mfu:.0%} of {peak:g} TFLOP/s on {plan.world_size} ranks"
