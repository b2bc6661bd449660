"""What a configuration will cost, computed without starting anything: placement, parameters, memory, FLOPs, messages, bubble.

Parameter counts are exact. Activation memory is an estimate of what the backward pass keeps, from the sizes of the layers (a test
compares it with what autograd keeps); allocator overhead, temporaries and the communication library are not included. No torch.

Units: bytes, FLOPs, and tokens of one stream unless a name says otherwise. "Per rank" is one process.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_dmtd.architecture import Visit, num_parameters
from megatron_dmtd.architecture.activations import visit_activations_per_token
from megatron_dmtd.architecture.flops import head_flops, visit_flops
from megatron_dmtd.architecture.tensors import num_layer_parameters
from megatron_dmtd.config import Config, batch_size_stages, data_parallel_size, num_microbatches, validate
from megatron_dmtd.config.decoder import method_of
from megatron_dmtd.errors import ConfigError
from megatron_dmtd.models.vocab import padded_vocab_size
from megatron_dmtd.parallel.placement import Placement, Stage, place

_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """One pipeline stage, per rank of it."""

    stage: Stage
    streams_in: int
    """Token streams that enter: 2 where a Refresh model is still in its parallel layers."""
    num_parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Kept for the backward pass, for all microbatches in flight."""
    microbatches_in_flight: int
    step_flops: float
    """Model FLOPs of one step on one rank of this stage, recompute and dead work left out."""
    sends_bytes: int
    """Hidden states to the next stage, per microbatch and rank, forward (the gradient that comes back has the same size)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A whole run."""

    config: Config
    world_size: int
    data_parallel: int
    num_microbatches: int
    tokens_per_step: int
    """Tokens of a step of `training.global_batch_size` rows; FLOPs, bubble and memory are of such a step too."""
    batch_sizes: tuple[tuple[int, int], ...]
    """Rows of a step and the number of such steps, in the order of the run: one entry unless the batch size is ramped up."""
    num_parameters: int
    """Parameters of the model, each counted once, without padding of the vocabulary."""
    step_flops: float
    """FLOPs of the whole step on all ranks."""
    bubble: float
    """Fraction of a step for which a pipeline rank waits, if all stages take equally long."""
    stages: tuple[StagePlan, ...]

    @property
    def run_tokens(self) -> int:
        """Tokens of all steps of the run."""
        return sum(rows * steps for rows, steps in self.batch_sizes) * self.config.data.seq_length

    def rank_bytes(self, rank: int) -> int:
        """Estimated memory of a process on pipeline rank `rank`."""
        held = [plan for plan in self.stages if plan.stage.rank == rank]
        return sum(plan.weight_bytes + plan.gradient_bytes + plan.optimizer_bytes + plan.activation_bytes for plan in held)


def _stage_parameters(config: Config, placement: Placement, stage: Stage) -> int:
    """Parameters of one rank of a stage, padding and copies of the table included."""
    decoder, tensor = placement.schedule.decoder, config.parallel.tensor
    table = padded_vocab_size(decoder.vocab_size) * decoder.hidden_size // tensor
    tables = int(stage.index in placement.table_stages) + int(stage.has_output and not placement.tied)
    others = decoder.hidden_size if stage.has_output and decoder.final_norm.has_weight else 0
    if stage.has_output and decoder.logit_scale is not None:
        others += padded_vocab_size(decoder.vocab_size) // tensor
    loop = decoder.loop
    if loop is not None and loop.injection == "concat_linear" and loop.first_layer in stage.layers:
        others += 2 * decoder.hidden_size**2
    layers = (decoder.layers[layer] for layer in stage.layers)
    own = sum(num_layer_parameters(layer, decoder.hidden_size, tensor_parallel=tensor) for layer in layers)
    return own + tables * table + others


def _activation_bytes(config: Config, placement: Placement, stage: Stage, in_flight: int, *, on_gpu: bool) -> int:
    parallel, size, schedule = config.parallel, _BYTES[config.training.precision], placement.schedule
    tokens = config.training.micro_batch_size * config.data.seq_length
    sequence = parallel.tensor if parallel.sequence_parallel else 1

    def kept_by(visit: Visit) -> float:
        """Numbers per token of the row, of all its streams."""
        per_stream = visit_activations_per_token(
            schedule, visit, on_gpu=on_gpu, tensor=parallel.tensor, sequence_parallel=parallel.sequence_parallel
        )
        return len(visit.streams) * per_stream

    whole_visits = [kept_by(visit) for visit in stage.visits]
    if parallel.recompute == "full":
        inputs = sum(len(visit.streams) for visit in stage.visits) * (schedule.decoder.hidden_size / sequence)
        kept = inputs * in_flight + max(whole_visits)
    else:
        kept = sum(whole_visits) * in_flight
    numbers = tokens * kept
    if stage.has_output:
        # The head's fp32 logits and their softmax, of one microbatch: its backward pass follows at once.
        numbers += tokens * 2 * (4 / size) * padded_vocab_size(schedule.decoder.vocab_size) / parallel.tensor
    return int(numbers * size)


def _in_flight(config: Config, stage: Stage, microbatches: int) -> int:
    """Microbatches whose activations a stage holds at once (1F1B, or its interleaved form)."""
    ranks, virtual = config.parallel.pipeline, config.parallel.virtual_stages
    if virtual == 1:
        return min(microbatches, ranks - stage.rank)
    warm_up = 2 * (ranks - stage.rank - 1) + (virtual - 1) * ranks + 1
    return min(microbatches, -(-warm_up // virtual))


def _stage_flops(config: Config, placement: Placement, stage: Stage, tokens: int) -> float:
    """The stage's share of the model's FLOPs over rows that hold one document each."""
    schedule, length = placement.schedule, config.data.seq_length
    rows = tokens // length
    visits = sum(float(rows * visit_flops(schedule, visit, document_lengths=[length])) for visit in stage.visits)
    return visits + (head_flops(schedule, num_tokens=tokens) if stage.has_output else 0)


def make_plan(config: Config, *, world_size: int, on_gpu: bool = True) -> Plan:
    """Plan a run on `world_size` processes. Raises `ConfigError` for whatever the configuration or the layout cannot do.

    `on_gpu`: whether the estimate of activations assumes a GPU's kernels or a CPU's.
    """
    validate(config, world_size=world_size)
    placement = place(config)
    replicas, microbatches = data_parallel_size(config, world_size), num_microbatches(config, world_size)
    tokens_per_replica = config.training.global_batch_size * config.data.seq_length // replicas
    run = _Run(replicas=replicas, microbatches=microbatches, tokens=tokens_per_replica, on_gpu=on_gpu)
    stages = tuple(_plan_stage(config, placement, stage, run) for stage in placement.stages)
    ranks, virtual = config.parallel.pipeline, config.parallel.virtual_stages
    flops = sum(plan.step_flops for plan in stages) * config.parallel.tensor * replicas
    return Plan(
        config=config,
        world_size=world_size,
        data_parallel=replicas,
        num_microbatches=microbatches,
        tokens_per_step=config.training.global_batch_size * config.data.seq_length,
        batch_sizes=tuple(batch_size_stages(config.training)),
        num_parameters=num_parameters(placement.schedule.decoder),
        step_flops=flops,
        bubble=(ranks - 1) / (virtual * microbatches + ranks - 1),
        stages=stages,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """What all stages share."""

    replicas: int
    microbatches: int
    tokens: int
    """Per replica and step."""
    on_gpu: bool


def _plan_stage(config: Config, placement: Placement, stage: Stage, run: _Run) -> StagePlan:
    parameters = _stage_parameters(config, placement, stage)
    size = _BYTES[config.training.precision]
    in_flight = _in_flight(config, stage, run.microbatches)
    optimizer = parameters * (8 + (4 if size == 2 else 0))
    sequence = config.parallel.tensor if config.parallel.sequence_parallel else 1
    schedule = placement.schedule
    rows = config.training.micro_batch_size * len(schedule.streams_into(stage.next_visit))
    return StagePlan(
        stage=stage,
        streams_in=len(stage.visits[0].streams),
        num_parameters=parameters,
        weight_bytes=parameters * size,
        gradient_bytes=parameters * 4,
        optimizer_bytes=optimizer // run.replicas if config.parallel.distributed_optimizer else optimizer,
        activation_bytes=_activation_bytes(config, placement, stage, in_flight, on_gpu=run.on_gpu),
        microbatches_in_flight=in_flight,
        step_flops=_stage_flops(config, placement, stage, run.tokens) / config.parallel.tensor,
        sends_bytes=0 if stage.has_output else rows * config.data.seq_length * schedule.decoder.hidden_size * size // sequence,
    )


def require_memory(plan: Plan, *, device_gib: float) -> None:
    """Raise `ConfigError` if a rank's estimate exceeds `device_gib`."""
    for rank in range(plan.config.parallel.pipeline):
        needed = plan.rank_bytes(rank) / 2**30
        if needed > device_gib:
            raise ConfigError(
                found=f"about {needed:.1f} GiB on pipeline rank {rank}",
                required=f"no more than the device's {device_gib:g} GiB",
                remedy="raise parallel.tensor or parallel.pipeline, lower training.micro_batch_size, "
                "or set parallel.recompute to full",
            )


# --- as text --------------------------------------------------------------------------------------------------------------------


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f}"


def _roles(plan: StagePlan) -> str:
    stage = plan.stage
    roles = [("embeds", stage.has_input_embedding), ("adds Embed(x)", stage.has_split), ("head and loss", stage.has_output)]
    return ", ".join(name for name, is_here in roles if is_here) or "-"


def _describe_run(plan: Plan) -> str:
    text = f"{plan.config.training.steps:,} steps, {plan.run_tokens:,} tokens"
    if not plan.config.training.rampup_batch_size:
        return text
    stages = ", ".join(f"{steps:,} of {rows} rows" for rows, steps in plan.batch_sizes)
    full = plan.config.training.global_batch_size
    return f"{text}: {stages}" + (f"; it ends before a step has {full} rows" if plan.batch_sizes[-1][0] < full else "")


def _describe_model(plan: Plan) -> str:
    method, num_layers = method_of(plan.config.cycle), plan.config.model.num_layers
    text = f"{method.variant}: {plan.num_parameters / 1e6:,.1f} M parameters, {num_layers} layers"
    parallel = method.num_parallel_layers
    return text + (f" ({parallel} parallel), cycles of {method.cycle_length}" if parallel else "")


def describe(plan: Plan) -> str:
    """The plan as a table for people."""
    config, parallel = plan.config, plan.config.parallel
    lines = [
        _describe_model(plan),
        f"{plan.world_size} processes = tensor {parallel.tensor} x pipeline {parallel.pipeline} x data {plan.data_parallel}"
        + (f", {parallel.virtual_stages} virtual stages" if parallel.virtual_stages > 1 else "")
        + f"; {plan.num_microbatches} microbatches per step, {config.training.precision}, recompute {parallel.recompute}",
        f"{plan.tokens_per_step:,} tokens and {plan.step_flops / 1e12:,.2f} TFLOP per step; pipeline bubble {plan.bubble:.1%}",
        _describe_run(plan),
        "",
    ]
    header = (
        "stage",
        "rank",
        "layers",
        "streams",
        "M params",
        "weights",
        "grads",
        "optimizer",
        "activations",
        "GFLOP/step",
        "sends MiB",
    )
    rows = [
        (
            str(p.stage.index),
            str(p.stage.rank),
            f"{p.stage.layers[0]}-{p.stage.layers[-1]}",
            str(p.streams_in),
            f"{p.num_parameters / 1e6:,.1f}",
            _gib(p.weight_bytes),
            _gib(p.gradient_bytes),
            _gib(p.optimizer_bytes),
            f"{_gib(p.activation_bytes)} ({p.microbatches_in_flight})",
            f"{p.step_flops / 1e9:,.1f}",
            f"{p.sends_bytes / 2**20:,.2f}",
        )
        for p in plan.stages
    ]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row, roles in zip([header, *rows], ["what else it holds", *map(_roles, plan.stages)], strict=True):
        lines.append("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + "  " + roles)
    largest = max(range(parallel.pipeline), key=plan.rank_bytes)
    lines += [
        "",
        f"memory in GiB per process (microbatches in flight); largest: pipeline rank {largest}, {_gib(plan.rank_bytes(largest))}",
    ]
    return "\n".join(lines)


def to_dict(plan: Plan) -> dict[str, object]:
    """The plan as JSON values."""
    stages = [
        {"index": p.stage.index, "rank": p.stage.rank, "first_layer": p.stage.first_layer, "num_layers": p.stage.num_layers}
        | {name: getattr(p, name) for name in (field.name for field in dataclasses.fields(p)) if name != "stage"}
        for p in plan.stages
    ]
    names = (
        *("world_size", "data_parallel", "num_microbatches", "tokens_per_step", "batch_sizes", "run_tokens"),
        *("num_parameters", "step_flops", "bubble"),
    )
    return {name: getattr(plan, name) for name in names} | {"stages": stages}
