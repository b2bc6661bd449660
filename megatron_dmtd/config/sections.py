"""The configuration: frozen sections, one per concern, passed by section.

This module knows no torch and no Megatron; `models/transformer_config.py` is the one crossing to Megatron's own configuration.
A field's docstring gives its meaning, unit and range; the command line's `--help` prints them. Nothing here changes a value:
`validate.py` accepts the configuration as it stands or refuses it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron_dmtd.architecture.spec import RopeScaling
from megatron_dmtd.cycle import VANILLA, VARIANTS

Variant = Literal["vanilla", "causal-norefresh", "causal-refresh", "bidirectional-norefresh", "bidirectional-refresh"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of the decoder. The field names are those of Hugging Face's Qwen3 where it has one."""

    family: str = "auto"
    """Hugging Face's name (`model_type`) of the architecture that a vanilla export has, such as `llama`. `auto`: the first that
    has everything the decoder has. An import sets it; nothing is computed by it."""
    num_layers: int = 36
    """Transformer layers, parallel and sequential together."""
    hidden_size: int = 2560
    """Width of the residual stream."""
    intermediate_size: int = 9728
    """Width of the gated feed-forward layer (SwiGLU)."""
    num_attention_heads: int = 32
    """Query heads."""
    num_key_value_heads: int = 8
    """Key and value heads; divides the query heads."""
    head_dim: int = 128
    """Width of one head; even."""
    vocab_size: int = 151936
    """Rows of the embedding table, before padding for the layout."""
    max_position_embeddings: int = 40960
    """Longest document, in tokens, that the model is meant for."""
    rope_theta: float = 1_000_000.0
    """Base of the rotary position embedding."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    """How rotary frequencies differ from the default ones, for contexts longer than the original one."""
    rms_norm_eps: float = 1e-6
    """Epsilon of every RMSNorm."""
    tie_word_embeddings: bool = True
    """Whether the output head is the embedding table."""
    qk_norm: bool = True
    """RMSNorm on each query and key head: true for Qwen3-like decoders, false for Llama-like ones."""
    qkv_bias: bool = False
    """Biases of the query, key and value projections: true for Qwen2-like decoders."""
    output_bias: bool = False
    """Bias of the attention's output projection."""
    sliding_window: int = 0
    """Keys that a query of a windowed layer sees at most, itself included. 0: no layer is windowed, all see all keys before."""
    windowed_layers: tuple[int, ...] = ()
    """Indices, from 0, of the layers with a sliding window. Empty: all of them, if `sliding_window` is set."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; projections back to the residual stream use `init_std / sqrt(2 num_layers)`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CycleConfig:
    """The method: which layers run in parallel, and what they see."""

    variant: Variant = "bidirectional-refresh"
    """`vanilla` (an ordinary decoder), or block attention (`causal`, `bidirectional`) and history (`norefresh`: earlier cycles
    stay as their shadow; `refresh`: earlier cycles are re-read as real tokens)."""
    num_parallel_layers: int = 28
    """The first layers, which run once per cycle on the shadow block; the others run once per token. Ignored by `vanilla`."""
    cycle_length: int = 4
    """Tokens per cycle."""
    mask_token_id: int = 151660
    """The id that stands for a token not yet known; must not occur as text."""

    @property
    def is_vanilla(self) -> bool:
        """Whether this is the baseline: the same weights as an ordinary decoder."""
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
    """How the model is spread over processes. What is left of the world size is data parallelism."""

    tensor: int = 1
    """Tensor-parallel ranks: each layer's matrices are split over them."""
    pipeline: int = 1
    """Pipeline stages. A boundary lies at the parallel/sequential split whenever there is more than one."""
    virtual_stages: int = 1
    """Stages that each pipeline rank holds (interleaved schedule): smaller bubble, more communication. 1: not interleaved."""
    stage_layers: tuple[int, ...] = ()
    """Layers per stage, in order (`pipeline` times `virtual_stages` numbers; rank 0 holds stages 0, `pipeline`, ...).
    Empty: split by cost, with a boundary at the parallel/sequential split."""
    context: int = 1
    """Context-parallel ranks. Not built: must be 1 (docs/parallelism.md says how it would work and what it would cost)."""
    sequence_parallel: bool = False
    """Split norms and residual along the sequence over the tensor-parallel ranks."""
    distributed_optimizer: bool = True
    """Shard optimizer state over the data-parallel ranks (Megatron's distributed optimizer)."""
    overlap_grad_reduce: bool = False
    """Overlap the gradient reduction with the backward pass."""
    overlap_param_gather: bool = False
    """Overlap the parameter gather with the forward pass; needs `distributed_optimizer` and `overlap_grad_reduce`."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recompute: none, attention cores only, or whole layers."""
    attention_backend: Literal["auto", "dense", "masked", "flex", "te"] = "auto"
    """Kernel of the attention. `auto`: `flex` on a GPU, `dense` on a CPU. `masked` is the slow, obvious one, `te` Transformer
    Engine's."""
    timeout_s: float = 600.0
    """Seconds after which a collective that has not finished is an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Tokenised corpora (Megatron IndexedDataset prefixes) and how they become batches."""

    train: tuple[str, ...] = ()
    """Prefixes of the training corpora: `PREFIX.bin` and `PREFIX.idx`."""
    valid: tuple[str, ...] = ()
    """Prefixes of the held-out corpora. Empty: no evaluation."""
    train_weights: tuple[float, ...] = ()
    """Shares of the training corpora in the rows, one positive number each; they need not add up to 1. Empty: they are one
    corpus, in which every document occurs once per epoch."""
    tokenizer: str = ""
    """Directory of the Hugging Face tokenizer that made the corpora; copied into exports."""
    seq_length: int = 4096
    """Slots per row of a batch; a multiple of the cycle length."""
    pad_token_id: int = 151643
    """Id that fills the end of a document's last cycle. It may equal EOS: padding is known by place, never by value."""
    shuffle_seed: int = 1234
    """Seed of the document order of each epoch, and of the order of blended corpora; at least 0."""
    packing: Literal["concatenate", "best-fit"] = "concatenate"
    """How documents fill rows. `concatenate`: one stream, cut every `seq_length` slots, almost without padding. `best-fit`: no
    document is cut that fits into a row; the room that is left is padding."""
    cache_dir: str = ""
    """Folder of the row indices, which are built once and memory-mapped. Empty: `index-cache` beside the first corpus."""
    prefetch_batches: int = 2
    """Microbatches read ahead by a thread. 0: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW and the learning-rate schedule (Megatron's optimizer and parameter scheduler), which counts steps, not rows."""

    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 3e-5
    """Final learning rate."""
    warmup_steps: int = 100
    """Steps of linear warm-up from zero."""
    decay: Literal["cosine", "linear", "constant", "WSD"] = "cosine"
    """Shape of the decay."""
    decay_steps: int = 0
    """Step at which the decay ends. 0: the last step of training."""
    wsd_decay_steps: int = 0
    """Length of the final decay of `WSD`, in steps. Must be positive exactly when `decay` is `WSD`."""
    wsd_decay_style: Literal["cosine", "linear", "exponential", "minus_sqrt"] = "cosine"
    """Shape of the final decay of `WSD`."""
    weight_decay: float = 0.1
    """Decoupled weight decay; norms and biases are exempt."""
    beta1: float = 0.9
    """Decay of Adam's first moment."""
    beta2: float = 0.95
    """Decay of Adam's second moment."""
    eps: float = 1e-8
    """Adam's epsilon."""
    clip_grad: float = 1.0
    """Largest gradient norm; 0 does not clip."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """The loop."""

    objective: str = "next_token"
    """What is minimised: `next_token`, the cross-entropy of each next token of packed corpora."""
    steps: int = 1000
    """Optimizer steps of the whole run."""
    micro_batch_size: int = 1
    """Rows per forward pass and rank."""
    global_batch_size: int = 8
    """Rows per optimizer step, over all ranks; a multiple of `micro_batch_size` times data-parallel ranks."""
    rampup_batch_size: tuple[int, ...] = ()
    """START, INCREMENT, SAMPLES: begin with steps of START rows and grow by INCREMENT to `global_batch_size`, evenly over the
    first SAMPLES rows. Each size must fit the ranks as `global_batch_size` does. Empty: no step is smaller."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Compute type. `bf16` keeps fp32 master weights and fp32 gradients."""
    freeze_embeddings: bool = False
    """Train neither the embedding table nor the output head: for continued training, whose vocabulary is learnt already."""
    seed: int = 1234
    """Seed of the initial weights (the same for every layout) and of dropout."""
    eval_interval: int = 100
    """Steps between evaluations; 0 evaluates only at the end."""
    eval_batches: int = 8
    """Global batches per evaluation. 0: all of the held-out corpus."""
    deterministic: bool = True
    """Refuse kernels that are not reproducible, where torch can tell."""
    max_bad_steps: int = 0
    """Steps of the whole run that may be skipped because their loss or gradient is not finite. One more stops the run."""
    watchdog_s: float = 300.0
    """Seconds without progress after which a rank names the stalled ones and ends the job. 0: never. Useful only below
    `parallel.timeout_s`, and above the longest step, the first one's compilation included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Saving and resuming."""

    dir: str = ""
    """Folder of this run's checkpoints. Empty: nothing is saved."""
    interval: int = 500
    """Steps between saves; the last step is always saved. 0: only the last."""
    keep_last: int = 3
    """Newest checkpoints kept; 0 keeps all."""
    keep_every: int = 0
    """Checkpoints of steps that this number divides are kept for ever. 0: none beside the newest."""
    asynchronous: bool = True
    """Write in the background: training waits for a copy of the state only, which takes as much host memory as the checkpoint."""
    resume: bool = True
    """Continue from the checkpoint that `latest` in `dir` names, if there is one. False: `dir` must hold none."""
    init_from: str = ""
    """A checkpoint whose model weights, and nothing else, start a new run. Empty: random weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig:
    """What is written where."""

    dir: str = ""
    """Folder of `metrics.jsonl` and wandb's files. Empty: console only."""
    interval: int = 10
    """Steps between log lines."""
    wandb_project: str = ""
    """wandb project. Empty: wandb is off. Without a key wandb writes offline runs."""
    run_name: str = ""
    """Name of the run in wandb."""
    peak_tflops: float = 0.0
    """Peak TFLOP/s of one device, for MFU. 0: not known."""
    measure_peak: bool = False
    """Measure the peak when the run starts, by products of large matrices in the compute type, on all ranks at once; for where
    `peak_tflops` is 0. Without either MFU is not reported."""
    progress: bool = True
    """Progress bar on rank 0's terminal."""
    spike_deviations: float = 6.0
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
