"""The configuration: frozen sections, one per concern, passed by section.

This module knows no torch and no Megatron; `models/transformer_config.py` is the one crossing to Megatron's own configuration.
A field's docstring gives its meaning and unit; its `setting` gives the default, the range, and whether a resumed run may change
it. The command line's `--help` prints them all. Nothing here changes a value: `validate.py` accepts a configuration as it is, or
refuses it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron_dmtd.architecture.spec import RopeScaling
from megatron_dmtd.config.metadata import FRACTION, NOT_NEGATIVE, POSITIVE, fixed, may_change, nested, setting
from megatron_dmtd.cycle import VANILLA, VARIANTS

Variant = Literal["vanilla", "causal-norefresh", "causal-refresh", "bidirectional-norefresh", "bidirectional-refresh"]

# Why a resumed run may, or may not, set a field differently
_HOW_IT_RUNS = may_change("affects how the run works, not what it computes")
_LAYOUT = may_change("the state is resharded: the same run up to rounding")
_ROUNDING = may_change("the same run up to rounding")
_SCHEDULE = may_change("the schedule follows the new value from here on")
_OPTIMIZER = may_change("the optimizer uses the new value from here on")
_COUNTED = may_change("rows are counted, not batches: no row is lost or repeated")
_MEASURES = may_change("affects only what is measured")
_MADE = may_change("the weights have already been initialised")
_MADE_OR_UNIT = may_change(
    "the weights have already been initialised",
    not_with="model.normalized",
    why_not_with="it is the unit of the stored scales: another model",
)
_FILES = may_change("the same corpora may have moved; others are refused when their rows are counted")
_PRECISION = may_change(
    "weights and moments are kept in fp32 in both",
    only_with="parallel.distributed_optimizer",
    why_only_with="without parallel.distributed_optimizer Megatron stores the two precisions in incompatible forms",
)
_SHAPE = fixed("another model")
_METHOD = fixed("another method")
_ROWS = fixed("different rows, or the same rows in another order")
_OBJECTIVE = fixed("another objective: what is logged and stored differs")
_STORED = fixed("Megatron stores the two kinds of optimizer in incompatible forms")
_FROZEN = fixed("the optimizer's state would lack the embedding table, or hold one that is not trained")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of the decoder. Field names are those of Hugging Face's Qwen3 where it has an equivalent."""

    family: str = setting("auto", resume=may_change("names the architecture of exports; nothing is computed by it"))
    """Hugging Face's name (`model_type`) of the architecture that a vanilla export has, such as `llama`. `auto`: the first that
    has everything the decoder has. An import sets it; nothing is computed by it."""
    num_layers: int = setting(36, POSITIVE, resume=_SHAPE)
    """Transformer layers, parallel and sequential together."""
    hidden_size: int = setting(2560, POSITIVE, resume=_SHAPE)
    """Width of the residual stream."""
    intermediate_size: int = setting(9728, POSITIVE, resume=_SHAPE)
    """Width of the gated feed-forward layer (SwiGLU)."""
    num_attention_heads: int = setting(32, POSITIVE, resume=_SHAPE)
    """Query heads."""
    num_key_value_heads: int = setting(8, POSITIVE, resume=_SHAPE)
    """Key and value heads; divides the query heads."""
    head_dim: int = setting(128, POSITIVE, resume=_SHAPE)
    """Width of one head; even."""
    vocab_size: int = setting(151936, POSITIVE, resume=_SHAPE)
    """Rows of the embedding table, before padding for the layout."""
    max_position_embeddings: int = setting(40960, POSITIVE, resume=may_change("the weights do not depend on it"))
    """Longest document, in tokens, that the model is meant to process."""
    rope_theta: float = setting(1_000_000.0, POSITIVE, resume=_SHAPE)
    """Base of the rotary position embedding."""
    rope_scaling: RopeScaling = nested(RopeScaling, resume=_SHAPE)
    """How rotary frequencies differ from the default ones, for contexts longer than the original one."""
    rms_norm_eps: float = setting(1e-6, POSITIVE, resume=_SHAPE)
    """Epsilon of every RMSNorm."""
    tie_word_embeddings: bool = setting(True, resume=_SHAPE)
    """Whether the output head is the embedding table."""
    qk_norm: bool = setting(True, resume=_SHAPE)
    """RMSNorm on each query and key head: true for Qwen3-like decoders, false for Llama-like ones."""
    qkv_bias: bool = setting(False, resume=_SHAPE)
    """Biases of the query, key and value projections: true for Qwen2-like decoders."""
    output_bias: bool = setting(False, resume=_SHAPE)
    """Bias of the attention's output projection."""
    sliding_window: int = setting(0, NOT_NEGATIVE, resume=_SHAPE)
    """Most keys that a query of a windowed layer sees, its own included. 0: there are no windowed layers."""
    windowed_layers: tuple[int, ...] = setting((), NOT_NEGATIVE, resume=_SHAPE)
    """Indices, from 0, of the layers with a sliding window. Empty: all of them, if `sliding_window` is set."""
    normalized: bool = setting(False, resume=_SHAPE)
    """Dory's layers, whose states have norm 1 (nGPT, arXiv 2410.01131): a learned step instead of a sum, norms without weights,
    learned scales of queries, gates and logits, and a gate on attention. Needs `qk_norm` true and `tie_word_embeddings` false."""
    step_init: float = setting(0.05, POSITIVE, resume=_SHAPE)
    """`normalized`: length of a new model's steps."""
    attention_gate_init: float = setting(0.0, NOT_NEGATIVE, resume=_SHAPE)
    """`normalized`: factor on a new model's attention gates, before the sigmoid. 0: the square root of `hidden_size`."""
    second_rope_theta: float = setting(0.0, NOT_NEGATIVE, resume=_SHAPE)
    """Base of the rotary position embedding of `second_rope_layers`. 0: every layer has `rope_theta`."""
    second_rope_layers: tuple[int, ...] = setting((), NOT_NEGATIVE, resume=_SHAPE)
    """Indices, from 0, of the layers with `second_rope_theta`."""
    num_input_layers: int = setting(0, NOT_NEGATIVE, resume=_SHAPE)
    """Layers before those that run in a loop. Ignored without a loop."""
    num_recurrent_layers: int = setting(0, NOT_NEGATIVE, resume=_SHAPE)
    """Layers that run in a loop, several times with the same weights. 0: every layer runs once."""
    num_loops: int = setting(1, POSITIVE, resume=may_change("the weights do not depend on it"))
    """How often the recurrent layers run."""
    recurrent_kv_cache_mode: Literal["per_loop", "last_loop"] = setting(
        "per_loop", resume=may_change("training does not depend on it")
    )
    """What later tokens see of the recurrent layers in decoding: keys and values of the same loop, or of the last one only."""
    injection: Literal["residual", "add", "concat_linear"] = setting("residual", resume=_SHAPE)
    """How each loop takes in the hidden states h that reached the first one. `residual`: norm(s + h), Dory's, for `normalized`;
    `add`: s + h, with s = 0 at first; `concat_linear`: a matrix times [s; h]."""
    init_std: float = setting(0.02, POSITIVE, resume=_MADE_OR_UNIT)
    """Standard deviation of the initial weights; projections back to the residual stream use `init_std / sqrt(2 num_layers)`.
    With `normalized` it is also the unit of the stored scales, and part of the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CycleConfig:
    """The method: which layers run in parallel, and what they see."""

    variant: Variant = setting("bidirectional-refresh", resume=_METHOD)
    """`vanilla` (an ordinary decoder), or block attention (`causal`, `bidirectional`) and history (`norefresh`: earlier cycles
    stay as their shadow; `refresh`: earlier cycles are re-read as real tokens)."""
    num_parallel_layers: int = setting(28, resume=_METHOD)
    """The first layers, which run once per cycle on the shadow block; the others run once per token. Ignored by `vanilla`."""
    cycle_length: int = setting(4, POSITIVE, resume=_METHOD)
    """Tokens per cycle."""
    mask_token_id: int = setting(151660, resume=_METHOD)
    """The id that stands for a token not yet known; must not occur as text."""

    @property
    def is_vanilla(self) -> bool:
        """Whether this is the baseline: the same weights used as an ordinary decoder."""
        return self.variant == VANILLA

    @property
    def history(self) -> str:
        """`real` or `shadow`: what earlier cycles look like to a shadow query. Not defined for `vanilla`."""
        return VARIANTS[self.variant][0]

    @property
    def block_attention(self) -> str:
        """`causal` or `bidirectional` inside the current shadow block. Not defined for `vanilla`."""
        return VARIANTS[self.variant][1]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How the model is distributed over processes. The remaining factor of the world size is data parallelism."""

    tensor: int = setting(1, POSITIVE, resume=_LAYOUT)
    """Tensor-parallel ranks: each layer's matrices are split over them."""
    pipeline: int = setting(1, POSITIVE, resume=_LAYOUT)
    """Pipeline stages. A boundary lies at the parallel/sequential split whenever there is more than one."""
    virtual_stages: int = setting(1, POSITIVE, resume=_LAYOUT)
    """Stages that each pipeline rank holds (interleaved schedule): smaller bubble, more communication. 1: not interleaved."""
    stage_layers: tuple[int, ...] = setting((), POSITIVE, resume=_LAYOUT)
    """Layers per stage, in order (`pipeline` times `virtual_stages` numbers; rank 0 holds stages 0, `pipeline`, ...).
    Empty: split by cost, with a boundary at the parallel/sequential split."""
    context: int = setting(1, POSITIVE, resume=_LAYOUT)
    """Context-parallel ranks. Not implemented: must be 1 (docs/parallelism.md explains how it could work)."""
    sequence_parallel: bool = setting(False, resume=_LAYOUT)
    """Split norms and residual along the sequence over the tensor-parallel ranks."""
    distributed_optimizer: bool = setting(True, resume=_STORED)
    """Shard optimizer state over the data-parallel ranks (Megatron's distributed optimizer)."""
    overlap_grad_reduce: bool = setting(False, resume=_HOW_IT_RUNS)
    """Overlap the gradient reduction with the backward pass."""
    overlap_param_gather: bool = setting(False, resume=_HOW_IT_RUNS)
    """Overlap the parameter gather with the forward pass; needs `distributed_optimizer` and `overlap_grad_reduce`."""
    recompute: Literal["none", "selective", "full"] = setting("none", resume=_HOW_IT_RUNS)
    """Activation recompute: none, attention cores only, or whole layers."""
    attention_backend: Literal["auto", "dense", "masked", "flex", "te"] = setting("auto", resume=_ROUNDING)
    """Kernel of the attention. `auto`: `flex` on a GPU, `dense` on a CPU. `masked` is slow and simple, `te` is Transformer
    Engine's."""
    timeout_s: float = setting(600.0, POSITIVE, resume=_HOW_IT_RUNS)
    """Seconds after which a collective that has not finished is an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Tokenised corpora (Megatron IndexedDataset prefixes) and how they become batches."""

    train: tuple[str, ...] = setting((), resume=_FILES)
    """Prefixes of the training corpora: `PREFIX.bin` and `PREFIX.idx`."""
    valid: tuple[str, ...] = setting((), resume=_MEASURES)
    """Prefixes of the held-out corpora. Empty: no evaluation."""
    train_weights: tuple[float, ...] = setting((), POSITIVE, resume=_ROWS)
    """Shares of the training corpora in the rows, one number each; they need not add up to 1. Empty: they are one
    corpus, in which every document occurs once per epoch."""
    tokenizer: str = setting("", resume=may_change("only copied into exports"))
    """Directory of the Hugging Face tokenizer that made the corpora; copied into exports."""
    add_bos: Literal["auto", "yes", "no"] = setting("auto", resume=may_change("only carried into exports"))
    """Whether documents begin with BOS, and prompts of exports will. `auto`: as the manifests of the corpora say; without
    manifests, as the tokenizer does."""
    seq_length: int = setting(4096, POSITIVE, resume=_ROWS)
    """Slots per row of a batch; a multiple of the cycle length."""
    pad_token_id: int = setting(151643, NOT_NEGATIVE, resume=_ROWS)
    """Id that fills the end of a document's last cycle. It may equal EOS: padding is recognised by position, never by value."""
    shuffle_seed: int = setting(1234, NOT_NEGATIVE, resume=_ROWS)
    """Seed of the document order of each epoch, and of the order of blended corpora."""
    packing: Literal["concatenate", "best-fit"] = setting("concatenate", resume=_ROWS)
    """How documents fill rows. `concatenate`: one stream, cut every `seq_length` slots, almost without padding. `best-fit`:
    documents that fit into a row are not cut; the rest of each row is padding."""
    cache_dir: str = setting("", resume=_HOW_IT_RUNS)
    """Folder of the row indices, which are built once and memory-mapped. Empty: `index-cache` in the first corpus's folder."""
    prefetch_batches: int = setting(2, NOT_NEGATIVE, resume=_HOW_IT_RUNS)
    """Microbatches read ahead by a thread. 0: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """Megatron's AdamW and learning-rate schedule, which counts steps, not rows."""

    lr: float = setting(3e-4, POSITIVE, resume=_SCHEDULE)
    """Peak learning rate."""
    min_lr: float = setting(3e-5, NOT_NEGATIVE, resume=_SCHEDULE)
    """Final learning rate."""
    warmup_steps: int = setting(100, NOT_NEGATIVE, resume=_SCHEDULE)
    """Steps of linear warm-up from zero."""
    decay: Literal["cosine", "linear", "constant", "WSD"] = setting("cosine", resume=_SCHEDULE)
    """Shape of the decay."""
    decay_steps: int = setting(0, NOT_NEGATIVE, resume=_SCHEDULE)
    """Step at which the decay ends. 0: the last step of training."""
    wsd_decay_steps: int = setting(0, NOT_NEGATIVE, resume=_SCHEDULE)
    """Length of the final decay of `WSD`, in steps. Must be positive exactly when `decay` is `WSD`."""
    wsd_decay_style: Literal["cosine", "linear", "exponential", "minus_sqrt"] = setting("cosine", resume=_SCHEDULE)
    """Shape of the final decay of `WSD`."""
    weight_decay: float = setting(0.1, NOT_NEGATIVE, resume=_OPTIMIZER)
    """Decoupled weight decay; norms, biases, scales and matrices with `unit_weights` are exempt."""
    unit_weights: bool = setting(True, resume=_OPTIMIZER)
    """`model.normalized`: after each step divide the vectors along the hidden size of every matrix by their norms. Ignored by
    other models."""
    beta1: float = setting(0.9, FRACTION, resume=_OPTIMIZER)
    """Decay of Adam's first moment."""
    beta2: float = setting(0.95, FRACTION, resume=_OPTIMIZER)
    """Decay of Adam's second moment."""
    eps: float = setting(1e-8, POSITIVE, resume=_OPTIMIZER)
    """Adam's epsilon."""
    clip_grad: float = setting(1.0, NOT_NEGATIVE, resume=_OPTIMIZER)
    """Largest gradient norm; 0 does not clip."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """The loop."""

    objective: str = setting("next_token", resume=_OBJECTIVE)
    """What is minimised: `next_token`, the cross-entropy of each next token of packed corpora."""
    steps: int = setting(1000, POSITIVE, resume=_SCHEDULE)
    """Optimizer steps of the whole run."""
    micro_batch_size: int = setting(1, POSITIVE, resume=_ROUNDING)
    """Rows per forward pass and rank."""
    global_batch_size: int = setting(8, POSITIVE, resume=_COUNTED)
    """Rows per optimizer step, over all ranks; a multiple of `micro_batch_size` times data-parallel ranks."""
    rampup_batch_size: tuple[int, ...] = setting((), POSITIVE, resume=_COUNTED)
    """START, INCREMENT, SAMPLES: begin with steps of START rows and grow by INCREMENT to `global_batch_size`, evenly over the
    first SAMPLES rows. Each size must fit the ranks as `global_batch_size` does. Empty: no step is smaller."""
    precision: Literal["fp32", "bf16"] = setting("fp32", resume=_PRECISION)
    """Compute type. `bf16` keeps fp32 master weights and fp32 gradients."""
    freeze_embeddings: bool = setting(False, resume=_FROZEN)
    """Train neither the embedding table nor the output head: for continued training, where the vocabulary has been learnt."""
    seed: int = setting(1234, NOT_NEGATIVE, resume=_MADE)
    """Seed of the initial weights (the same for every layout) and of dropout."""
    eval_interval: int = setting(100, NOT_NEGATIVE, resume=_MEASURES)
    """Steps between evaluations; 0 evaluates only at the end."""
    eval_at_start: bool = setting(True, resume=_MEASURES)
    """Also evaluate before the first step, as a baseline. A resumed run does not repeat it."""
    eval_batches: int = setting(8, NOT_NEGATIVE, resume=_MEASURES)
    """Global batches per evaluation. 0: all of the held-out corpus."""
    deterministic: bool = setting(True, resume=_ROUNDING)
    """Refuse kernels that are not reproducible, where torch can tell."""
    max_bad_steps: int = setting(0, NOT_NEGATIVE, resume=_HOW_IT_RUNS)
    """Steps of the whole run that may be skipped because their loss or gradient is not finite. One more stops the run."""
    watchdog_s: float = setting(300.0, NOT_NEGATIVE, resume=_HOW_IT_RUNS)
    """Seconds without progress after which a rank names the stalled ones and ends the job. 0: never. Useful only below
    `parallel.timeout_s`, and above the longest step, the first one's compilation included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Saving and resuming."""

    dir: str = setting("", resume=_HOW_IT_RUNS)
    """Folder of this run's checkpoints. Empty: nothing is saved."""
    interval: int = setting(500, NOT_NEGATIVE, resume=_HOW_IT_RUNS)
    """Steps between saves; the last step is always saved. 0: only the last."""
    keep_last: int = setting(3, NOT_NEGATIVE, resume=_HOW_IT_RUNS)
    """Newest checkpoints kept; 0 keeps all."""
    keep_every: int = setting(0, NOT_NEGATIVE, resume=_HOW_IT_RUNS)
    """Checkpoints of steps divisible by this number are kept for ever. 0: only the newest are kept."""
    asynchronous: bool = setting(True, resume=_HOW_IT_RUNS)
    """Write in the background: training waits only for a copy of the state, which takes as much host memory as the checkpoint."""
    resume: bool = setting(True, resume=_HOW_IT_RUNS)
    """Continue from the checkpoint that `latest` in `dir` names, if there is one. False: `dir` must hold none."""
    init_from: str = setting("", resume=may_change("read only when a run starts"))
    """A checkpoint, a run's `checkpoint.dir`, or a Hugging Face directory, whose model weights, and nothing else, start a new
    run. Settings of `model` that are not given are taken from it. Empty: random weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig:
    """What is written where."""

    dir: str = setting("", resume=_HOW_IT_RUNS)
    """Folder of `metrics.jsonl` and wandb's files. Empty: console only."""
    interval: int = setting(10, POSITIVE, resume=_HOW_IT_RUNS)
    """Steps between log lines."""
    wandb_project: str = setting("", resume=_HOW_IT_RUNS)
    """wandb project. Empty: wandb is off. Without a key wandb writes offline runs."""
    run_name: str = setting("", resume=_HOW_IT_RUNS)
    """Name of the run in wandb."""
    peak_tflops: float = setting(0.0, NOT_NEGATIVE, resume=_MEASURES)
    """Peak TFLOP/s of one device, for MFU. 0: not known."""
    measure_peak: bool = setting(False, resume=_MEASURES)
    """Measure the peak in the compute type when the run starts, on all ranks at once: the better of multiply-adds alone and of
    large products; only if `peak_tflops` is 0. Without either, MFU is not reported."""
    progress: bool = setting(True, resume=_HOW_IT_RUNS)
    """Progress bar on rank 0's terminal."""
    spike_deviations: float = setting(6.0, NOT_NEGATIVE, resume=_MEASURES)
    """A loss this many standard deviations above the mean of the last 64 is logged as a spike. 0: spikes are not looked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """One run. Saved whole with each checkpoint."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cycle: CycleConfig = field(default_factory=CycleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
