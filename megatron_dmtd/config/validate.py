"""One validation of a whole configuration. It refuses or returns; it never changes a value."""

from __future__ import annotations

import math
from typing import Any

from megatron_dmtd.architecture.spec import RopeScaling
from megatron_dmtd.config.batch_size import batch_sizes
from megatron_dmtd.config.metadata import settings
from megatron_dmtd.config.sections import Config, CycleConfig, DataConfig, ModelConfig, ParallelConfig, TrainingConfig
from megatron_dmtd.errors import ConfigError


def _require(condition: bool, *, found: str, required: str, remedy: str) -> None:
    if not condition:
        raise ConfigError(found=found, required=required, remedy=remedy)


def _validate_settings(section: Any, name: str) -> None:
    """Check each setting of a section on its own: its range, or its allowed values."""
    for setting in settings(type(section)):
        key, value = f"{name}.{setting.key}", setting.value_in(section)
        is_list = isinstance(value, tuple)
        if setting.choices:
            _require(
                value in setting.choices,
                found=f"{key} = {value!r}",
                required="one of " + ", ".join(setting.choices),
                remedy="choose one of these",
            )
        if setting.range:
            _require(
                all(map(setting.range.holds, value if is_list else (value,))),
                found=f"{key} = {list(value) if is_list else value}",
                required=f"{'numbers' if is_list else 'a number'} {setting.range}",
                remedy=f"set {key} to {'such numbers' if is_list else 'such a number'}",
            )


def validate_model(model: ModelConfig) -> None:
    """Raise `ConfigError` if the decoder's shape contradicts itself."""
    _validate_settings(model, "model")
    _require(
        model.num_attention_heads % model.num_key_value_heads == 0,
        found=f"{model.num_attention_heads} query heads over {model.num_key_value_heads} key-value heads",
        required="query heads that are a multiple of the key-value heads",
        remedy="change model.num_attention_heads or model.num_key_value_heads",
    )
    _require(
        model.head_dim % 2 == 0,
        found=f"model.head_dim = {model.head_dim}",
        required="an even number: rotary embedding rotates pairs of dimensions",
        remedy="set model.head_dim to an even number",
    )
    _validate_window(model)
    _validate_rope_scaling(model.rope_scaling)
    _validate_second_rope(model)
    _validate_normalized(model)
    _validate_loop(model)


def _validate_second_rope(model: ModelConfig) -> None:
    layers = model.second_rope_layers
    _require(
        bool(layers) == (model.second_rope_theta > 0),
        found=f"model.second_rope_theta = {model.second_rope_theta} with model.second_rope_layers = {list(layers)}",
        required="both or neither",
        remedy="set model.second_rope_theta to a positive number and name its layers, or leave out both",
    )
    _require(
        len(set(layers)) == len(layers) and all(0 <= layer < model.num_layers for layer in layers),
        found=f"model.second_rope_layers = {list(layers)} of {model.num_layers} layers",
        required=f"different indices from 0 to {model.num_layers - 1}",
        remedy="correct model.second_rope_layers",
    )


def _validate_normalized(model: ModelConfig) -> None:
    if not model.normalized:
        return
    wrong = {
        "qk_norm": not model.qk_norm,
        "tie_word_embeddings": model.tie_word_embeddings,
        "qkv_bias": model.qkv_bias,
        "output_bias": model.output_bias,
    }
    named = [f"model.{name} = {getattr(model, name)}" for name, is_wrong in wrong.items() if is_wrong]
    _require(
        not named,
        found="model.normalized = True with " + ", ".join(named),
        required="norms of queries and keys, a head of its own, and no biases",
        remedy="set qk_norm to true, tie_word_embeddings, qkv_bias and output_bias to false",
    )


def _validate_loop(model: ModelConfig) -> None:
    if not model.num_recurrent_layers:
        _require(
            model.num_loops == 1,
            found=f"model.num_loops = {model.num_loops} with model.num_recurrent_layers = 0",
            required="layers that run in the loop",
            remedy="set model.num_recurrent_layers, or model.num_loops to 1",
        )
        return
    last = model.num_input_layers + model.num_recurrent_layers
    _require(
        last <= model.num_layers,
        found=f"{model.num_input_layers} input and {model.num_recurrent_layers} recurrent layers of {model.num_layers} layers",
        required="no more than the model has",
        remedy="change model.num_input_layers or model.num_recurrent_layers; the rest are output layers",
    )
    _require(
        (model.injection == "residual") == model.normalized,
        found=f"model.injection = {model.injection} with model.normalized = {model.normalized}",
        required="residual in a normalized decoder, add or concat_linear in another",
        remedy=f"set model.injection to {'residual' if model.normalized else 'add or concat_linear'}",
    )


def _validate_window(model: ModelConfig) -> None:
    layers = model.windowed_layers
    _require(
        not layers or model.sliding_window > 0,
        found=f"model.windowed_layers = {list(layers)} with model.sliding_window = 0",
        required="the width of the window",
        remedy="set model.sliding_window, or leave out model.windowed_layers",
    )
    _require(
        len(set(layers)) == len(layers) and all(0 <= layer < model.num_layers for layer in layers),
        found=f"model.windowed_layers = {list(layers)} of {model.num_layers} layers",
        required=f"different indices from 0 to {model.num_layers - 1}",
        remedy="correct model.windowed_layers",
    )


def _validate_rope_scaling(scaling: RopeScaling) -> None:
    if scaling.rope_type == "default":
        _require(
            scaling == RopeScaling(),
            found="settings of model.rope_scaling with rope_type default",
            required="a rope_type that uses them: linear, llama3 or yarn",
            remedy="set model.rope_scaling.rope_type, or leave out the other settings",
        )
        return
    _require(
        math.isfinite(scaling.factor) and scaling.factor >= 1,
        found=f"model.rope_scaling.factor = {scaling.factor}",
        required="a number of at least 1",
        remedy="set model.rope_scaling.factor to the ratio of the longer context to the original one",
    )
    if scaling.rope_type == "linear":
        return
    _require(
        scaling.original_max_position_embeddings > 0,
        found=f"model.rope_scaling.original_max_position_embeddings = {scaling.original_max_position_embeddings}",
        required="the length of the context before scaling, in tokens",
        remedy="set model.rope_scaling.original_max_position_embeddings",
    )
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    _require(
        scaling.rope_type != "llama3" or 0 < low < high,
        found=f"model.rope_scaling.low_freq_factor = {low}, high_freq_factor = {high}",
        required="two positive numbers, the first below the second",
        remedy="set both (1 and 4 in Llama 3.1)",
    )
    _require(
        scaling.rope_type != "yarn" or scaling.beta_fast > scaling.beta_slow > 0,
        found=f"model.rope_scaling.beta_fast = {scaling.beta_fast}, beta_slow = {scaling.beta_slow}",
        required="two positive numbers, the first above the second",
        remedy="set both (32 and 1 in the paper)",
    )


def validate_cycle(cycle: CycleConfig, model: ModelConfig) -> None:
    """Raise `ConfigError` if the method's settings do not fit the decoder."""
    _validate_settings(cycle, "cycle")
    if cycle.is_vanilla:
        return
    _require(
        1 <= cycle.num_parallel_layers < model.num_layers,
        found=f"{cycle.num_parallel_layers} parallel layers of {model.num_layers} layers",
        required="at least one parallel and one sequential layer, which add up to model.num_layers",
        remedy=f"set cycle.num_parallel_layers between 1 and {model.num_layers - 1}",
    )
    first, last = model.num_input_layers, model.num_input_layers + model.num_recurrent_layers
    _require(
        not first < cycle.num_parallel_layers < last,
        found=f"cycle.num_parallel_layers = {cycle.num_parallel_layers} inside the loop of layers {first} to {last - 1}",
        required="a loop that lies in one of the two parts",
        remedy=f"set cycle.num_parallel_layers to {first} or less, or to {last} or more",
    )
    _require(
        0 <= cycle.mask_token_id < model.vocab_size,
        found=f"cycle.mask_token_id = {cycle.mask_token_id}",
        required=f"an id of the vocabulary, 0 to {model.vocab_size - 1}",
        remedy="use the id of a special token that no text contains",
    )


def validate_parallel(parallel: ParallelConfig, model: ModelConfig, cycle: CycleConfig) -> None:
    """Raise `ConfigError` if the layout cannot hold the model."""
    _validate_settings(parallel, "parallel")
    _require(
        parallel.context == 1,
        found=f"parallel.context = {parallel.context}",
        required="1: context parallelism is not implemented (docs/parallelism.md)",
        remedy="set parallel.context to 1; for longer rows use parallel.tensor, parallel.sequence_parallel or parallel.recompute",
    )
    for name, heads in (
        ("num_attention_heads", model.num_attention_heads),
        ("num_key_value_heads", model.num_key_value_heads),
    ):
        _require(
            heads % parallel.tensor == 0,
            found=f"model.{name} = {heads} over parallel.tensor = {parallel.tensor}",
            required="a number of heads divisible by the tensor-parallel ranks",
            remedy=f"set parallel.tensor to a divisor of {heads}",
        )
    _require(
        model.intermediate_size % parallel.tensor == 0,
        found=f"model.intermediate_size = {model.intermediate_size} over parallel.tensor = {parallel.tensor}",
        required="an intermediate size divisible by the tensor-parallel ranks",
        remedy="change parallel.tensor",
    )
    _require(
        not (parallel.sequence_parallel and parallel.tensor == 1),
        found="parallel.sequence_parallel with parallel.tensor = 1",
        required="two or more tensor-parallel ranks",
        remedy="set parallel.tensor to 2 or more, or parallel.sequence_parallel to false",
    )
    _require(
        not parallel.overlap_param_gather or (parallel.distributed_optimizer and parallel.overlap_grad_reduce),
        found="parallel.overlap_param_gather without both distributed_optimizer and overlap_grad_reduce",
        required="both of them",
        remedy="set all three, or parallel.overlap_param_gather to false",
    )
    # Megatron starts to reduce a gradient when it first arrives; recompute brings that of a looped layer in parts, run by run.
    _require(
        not (parallel.overlap_grad_reduce and parallel.recompute == "full" and model.num_recurrent_layers),
        found="parallel.overlap_grad_reduce with parallel.recompute = full in a model with a loop",
        required="one of the two",
        remedy="set parallel.overlap_grad_reduce to false, or parallel.recompute to none or selective",
    )
    _validate_stages(parallel, model, cycle)


def _validate_stages(parallel: ParallelConfig, model: ModelConfig, cycle: CycleConfig) -> None:
    _require(
        parallel.virtual_stages == 1 or parallel.pipeline > 1,
        found=f"parallel.virtual_stages = {parallel.virtual_stages} with parallel.pipeline = 1",
        required="two or more pipeline ranks to interleave",
        remedy="set parallel.virtual_stages to 1, or parallel.pipeline to 2 or more",
    )
    num_stages = parallel.pipeline * parallel.virtual_stages
    num_parts = model.num_layers - max(model.num_recurrent_layers - 1, 0)
    with_loop = f", {model.num_recurrent_layers} of them in a loop" if model.num_recurrent_layers else ""
    _require(
        num_stages <= num_parts,
        found=f"{num_stages} pipeline stages for {model.num_layers} layers{with_loop}",
        required="at least one layer on each stage" + (", and the whole loop on one" if with_loop else ""),
        remedy=f"set parallel.pipeline times parallel.virtual_stages to {num_parts} or less",
    )
    if not parallel.stage_layers:
        return
    stages = parallel.stage_layers
    shown = " + ".join(map(str, stages))
    _require(
        len(stages) == num_stages,
        found=f"parallel.stage_layers lists {len(stages)} stages ({shown}), parallel.pipeline is {parallel.pipeline}"
        + (f" with {parallel.virtual_stages} virtual stages" if parallel.virtual_stages > 1 else ""),
        required="one number per stage",
        remedy="change one of the two",
    )
    _require(
        sum(stages) == model.num_layers,
        found=f"parallel.stage_layers = {shown} = {sum(stages)} layers",
        required=f"exactly the model's {model.num_layers} layers",
        remedy="correct parallel.stage_layers",
    )
    boundaries = [sum(stages[: i + 1]) for i in range(len(stages))]
    first, last = model.num_input_layers, model.num_input_layers + model.num_recurrent_layers
    _require(
        not any(first < end < last for end in boundaries),
        found=f"stages end after layers {boundaries}",
        required=f"the loop of layers {first} to {last - 1} on one stage",
        remedy="move the boundary, or leave parallel.stage_layers empty",
    )
    if not cycle.is_vanilla and num_stages > 1:
        _require(
            cycle.num_parallel_layers in boundaries,
            found=f"stages end after layers {boundaries}",
            required=f"a stage boundary after the {cycle.num_parallel_layers} parallel layers",
            remedy="move the boundary, or leave parallel.stage_layers empty",
        )


def _validate_weights(data: DataConfig) -> None:
    _require(
        len(data.train_weights) in (0, len(data.train)),
        found=f"{len(data.train_weights)} data.train_weights for {len(data.train)} corpora in data.train",
        required="one weight per corpus, or none",
        remedy="give a weight for each corpus",
    )


def validate_data(data: DataConfig, config: Config) -> None:
    """Raise `ConfigError` if rows do not fit the cycles, the layout or the model."""
    _validate_settings(data, "data")
    _validate_weights(data)
    _require(
        data.seq_length % config.cycle.cycle_length == 0,
        found=f"data.seq_length = {data.seq_length} with cycle.cycle_length = {config.cycle.cycle_length}",
        required="rows of whole cycles",
        remedy="set data.seq_length to a multiple of cycle.cycle_length",
    )
    tensor = config.parallel.tensor
    _require(
        not config.parallel.sequence_parallel or data.seq_length % tensor == 0,
        found=f"data.seq_length = {data.seq_length} with sequence parallelism over {tensor} ranks",
        required="a row length divisible by the tensor-parallel ranks",
        remedy=f"set data.seq_length to a multiple of {tensor}",
    )
    _require(
        data.seq_length <= config.model.max_position_embeddings,
        found=f"data.seq_length = {data.seq_length}, model.max_position_embeddings = {config.model.max_position_embeddings}",
        required="rows no longer than the model's longest document",
        remedy="shorten the rows, or raise model.max_position_embeddings",
    )
    _require(
        data.pad_token_id < config.model.vocab_size,
        found=f"data.pad_token_id = {data.pad_token_id}",
        required=f"an id of the vocabulary, 0 to {config.model.vocab_size - 1}",
        remedy="use the tokenizer's pad or end-of-text id",
    )


def _validate_optimizer(config: Config) -> None:
    optimizer = config.optimizer
    _require(
        optimizer.min_lr <= optimizer.lr,
        found=f"optimizer.min_lr = {optimizer.min_lr} above optimizer.lr = {optimizer.lr}",
        required="a final learning rate no higher than the peak",
        remedy="lower optimizer.min_lr",
    )
    end = optimizer.decay_steps or config.training.steps
    _require(
        optimizer.warmup_steps < end,
        found=f"{optimizer.warmup_steps} warm-up steps, decay that ends at step {end}",
        required="a warm-up shorter than the schedule",
        remedy="lower optimizer.warmup_steps, or raise optimizer.decay_steps or training.steps",
    )
    _require(
        (optimizer.decay == "WSD") == (optimizer.wsd_decay_steps > 0),
        found=f"optimizer.decay = {optimizer.decay} with optimizer.wsd_decay_steps = {optimizer.wsd_decay_steps}",
        required="wsd_decay_steps above 0 exactly when decay is WSD",
        remedy="set both or neither",
    )


def _validate_training(config: Config) -> None:
    training = config.training
    _validate_ramp_up(training)
    _require(
        not (config.logging.measure_peak and config.logging.peak_tflops),
        found=f"logging.measure_peak with logging.peak_tflops = {config.logging.peak_tflops}",
        required="either a given or a measured peak",
        remedy="set logging.measure_peak to false, or logging.peak_tflops to 0",
    )


def _validate_ramp_up(training: TrainingConfig) -> None:
    ramp, full = training.rampup_batch_size, training.global_batch_size
    shown = f"training.rampup_batch_size = {list(ramp)}"
    _require(
        len(ramp) in (0, 3),
        found=shown,
        required="three numbers, START, INCREMENT and SAMPLES, or none",
        remedy="for example, write [16, 16, 100000]",
    )
    if not ramp:
        return
    start, increment, _ = ramp
    _require(
        start < full and (full - start) % increment == 0,
        found=f"{shown} with training.global_batch_size = {full}",
        required="a whole number of increments, at least one, from the first size to the last",
        remedy=f"choose START below {full} and an INCREMENT that divides {full} - START",
    )


def data_parallel_size(config: Config, world_size: int) -> int:
    """Data-parallel ranks of a layout on `world_size` processes. Raises `ConfigError` if it does not divide them."""
    parallel = config.parallel
    ranks = parallel.tensor * parallel.pipeline
    _require(
        world_size % ranks == 0 and world_size > 0,
        found=f"{world_size} processes for tensor {parallel.tensor} x pipeline {parallel.pipeline} = {ranks} ranks",
        required=f"a multiple of {ranks} processes",
        remedy="start a different number of processes, or change parallel.tensor or parallel.pipeline",
    )
    return world_size // ranks


def num_microbatches(config: Config, world_size: int) -> int:
    """Forward passes per rank and step. Raises `ConfigError` if the batch does not divide."""
    training = config.training
    ranks = data_parallel_size(config, world_size)
    rows = training.micro_batch_size * ranks
    _require(
        training.global_batch_size % rows == 0,
        found=f"training.global_batch_size = {training.global_batch_size} rows, "
        f"micro_batch_size {training.micro_batch_size} x {ranks} data-parallel ranks = {rows}",
        required="a global batch that is a multiple of the rows of one forward pass of all ranks",
        remedy=f"set training.global_batch_size to a multiple of {rows}",
    )
    for size in batch_sizes(training):
        _validate_batch(config, size, ranks=ranks)
    return training.global_batch_size // rows


def _validate_batch(config: Config, size: int, *, ranks: int) -> None:
    """Raise `ConfigError` if a step of `size` rows does not fit the schedule or the ranks."""
    parallel, rows = config.parallel, config.training.micro_batch_size * ranks
    ramp = config.training.rampup_batch_size
    _require(
        size % rows == 0,
        found=f"steps of {size} rows from training.rampup_batch_size = {list(ramp)}, "
        f"micro_batch_size {config.training.micro_batch_size} x {ranks} data-parallel ranks = {rows}",
        required="steps that are a multiple of the rows of one forward pass of all ranks",
        remedy=f"set START and INCREMENT to multiples of {rows}",
    )
    count = size // rows
    unit = rows * parallel.pipeline
    settings = "START and INCREMENT of training.rampup_batch_size and " if ramp else ""
    _require(
        parallel.virtual_stages == 1 or count % parallel.pipeline == 0,
        found=f"{count} microbatches per step for {parallel.pipeline} interleaved pipeline ranks",
        required="a multiple of the pipeline ranks: the interleaved schedule runs them in groups",
        remedy=f"set {settings}training.global_batch_size to a multiple of {unit}, or parallel.virtual_stages to 1",
    )


def validate(config: Config, *, world_size: int | None = None) -> None:
    """Accept `config` or raise `ConfigError`; with `world_size`, check the layout against the processes too."""
    validate_model(config.model)
    validate_cycle(config.cycle, config.model)
    validate_parallel(config.parallel, config.model, config.cycle)
    validate_data(config.data, config)
    for name in ("optimizer", "training", "checkpoint", "logging"):
        _validate_settings(getattr(config, name), name)
    _validate_optimizer(config)
    _validate_training(config)
    if world_size is not None:
        num_microbatches(config, world_size)
