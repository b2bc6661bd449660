"""Configuration: frozen sections, one validation, YAML and command line."""

from megatron_dmtd.config.batch_size import batch_size, batch_size_stages, batch_sizes
from megatron_dmtd.config.load import from_yaml, load_config, make_parser, parse, stated_keys, to_config, to_dict, to_yaml
from megatron_dmtd.config.sections import (
    CheckpointConfig,
    Config,
    CycleConfig,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)
from megatron_dmtd.config.validate import data_parallel_size, num_microbatches, validate

__all__ = [
    "CheckpointConfig",
    "Config",
    "CycleConfig",
    "DataConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "TrainingConfig",
    "batch_size",
    "batch_size_stages",
    "batch_sizes",
    "data_parallel_size",
    "from_yaml",
    "load_config",
    "make_parser",
    "num_microbatches",
    "parse",
    "stated_keys",
    "to_config",
    "to_dict",
    "to_yaml",
    "validate",
]
