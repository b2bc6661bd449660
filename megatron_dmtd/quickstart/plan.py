"""What the quickstart runs, where it puts the results, and how it uses this machine. Plain data, no torch.

A decoder is pretrained in the ordinary way and continued twice on the same tokens: as a DMTD model and as an ordinary one.

Everything is in one folder: `tokenizer/`, `data/`, one folder per training (`metrics.jsonl`, `checkpoints/`, `train.log`, and
`export/` except for the base), `decoding.json`, `large.json`, and the report.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dmtd.config import Config, from_yaml, to_dict, validate
from megatron_dmtd.infra.digests import sha256_of_file, sha256_of_text

#: the common starting point, the model and its control; also the names of their recipes
BASE, DMTD, CONTROL = "base", "bidirectional-refresh", "vanilla"
MODELS = (DMTD, CONTROL)
TRAININGS = (BASE, *MODELS)
#: the documents that the quickstart writes itself
STORIES = "stories"
#: fields of a model of random weights, but for its layers
LARGE_FIELDS: Mapping[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32_000,
    "mask_token_id": 31_999,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "dmtd_history_mode": "real",
    "dmtd_block_attention": "bidirectional",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The hardware of a machine."""

    num_gpus: int
    num_cores: int

    @property
    def num_processes(self) -> int:
        """Two processes, which share each batch; one process if there is a single GPU."""
        return min(2, self.num_gpus) if self.num_gpus else 2

    @property
    def threads_per_process(self) -> int:
        """Threads of each training process."""
        return max(1, self.num_cores // self.num_processes)

    def describe(self) -> str:
        """The machine in words."""
        return f"{self.num_gpus} GPU(s)" if self.num_gpus else f"{self.num_cores} CPU core(s)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One run of the quickstart."""

    root: Path
    """Root of the repository."""
    directory: Path
    """Folder for all output."""
    machine: Machine
    inputs: tuple[str, ...] = (STORIES,)
    """Documents, in any form that tools/preprocess.py accepts; `stories` are written by the quickstart."""
    stories: int = 16_000
    """How many of them."""
    heldout_fraction: float = 0.02
    """Fraction of the documents that neither the tokenizer nor the models see."""
    steps: int | None = None
    """Steps of each training run. None: those of the recipes."""
    prompts: int = 4
    """Held-out prompts to continue in the report."""
    new_tokens: int = 128
    """Tokens decoded per prompt, at most."""
    large_layers: tuple[int, int] = (14, 4)
    """Parallel and sequential layers of the large model: 1.3 GB in fp32, which no cache holds, in Qwen3-4B's proportion."""
    temperature: float = 0.8
    """Temperature of the samples."""
    top_p: float = 0.95
    """Nucleus of the samples."""
    timed_runs: int = 5
    """Timed decodings per model, after one warm-up."""

    @property
    def stories_file(self) -> Path:
        """The documents that the quickstart writes."""
        return self.directory / "data" / f"{STORIES}.jsonl"

    @property
    def sources(self) -> tuple[str, ...]:
        """The documents as tools/preprocess.py takes them."""
        return tuple(str(self.stories_file) if name == STORIES else name for name in self.inputs)

    @property
    def tokenizer(self) -> Path:
        """Folder of the tokenizer."""
        return self.directory / "tokenizer"

    @property
    def train_prefix(self) -> str:
        """Token file to train on."""
        return str(self.directory / "data" / "text-train")

    @property
    def heldout_prefix(self) -> str:
        """Token file held out from every model."""
        return str(self.directory / "data" / "text-heldout")

    @property
    def decoding_file(self) -> Path:
        """What the trained models decoded, and how fast."""
        return self.directory / "decoding.json"

    @property
    def large_file(self) -> Path:
        """How fast a large model decodes."""
        return self.directory / "large.json"

    def run_directory(self, model: str) -> Path:
        """Folder of one training run."""
        return self.directory / model

    def export_directory(self, model: str) -> Path:
        """Its Hugging Face directory."""
        return self.run_directory(model) / "export"

    def recipe(self, model: str) -> Path:
        """Its recipe, relative to the repository."""
        return Path("examples") / "quickstart" / f"{model}.yaml"

    def overrides(self, model: str) -> dict[str, str]:
        """The settings that differ from the recipe: folders and, if requested, the number of steps."""
        values = {
            "data.train": f"[{self.train_prefix}]",
            "data.valid": f"[{self.heldout_prefix}]",
            "data.tokenizer": str(self.tokenizer),
            "checkpoint.dir": str(self.run_directory(model) / "checkpoints"),
            "logging.dir": str(self.run_directory(model)),
        }
        if model != BASE:
            values["checkpoint.init_from"] = str(self.run_directory(BASE) / "checkpoints")
        if self.steps is not None:
            values |= {"training.steps": str(self.steps), "training.eval_interval": str(max(1, self.steps // 2))}
            values |= {"optimizer.warmup_steps": str(self.steps // 10)}
        return values

    def config(self, model: str) -> Config:
        """The resolved settings of one training run. Raises `ConfigError` if they cannot run."""
        config = from_yaml(self.root / self.recipe(model))
        training, optimizer = config.training, config.optimizer
        if self.steps is not None:
            training = dataclasses.replace(training, steps=self.steps, eval_interval=max(1, self.steps // 2))
            optimizer = dataclasses.replace(optimizer, warmup_steps=self.steps // 10)
        config = dataclasses.replace(config, training=training, optimizer=optimizer)
        validate(config, world_size=self.machine.num_processes)
        return config

    def train_command(self, model: str) -> list[str]:
        """The command line of one training run."""
        options = [word for name, value in self.overrides(model).items() for word in (f"--{name}", value)]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        script = ["--nproc-per-node", str(self.machine.num_processes), "tools/train.py", "--config", str(self.recipe(model))]
        return [*launcher, *script, *options]

    def train_environment(self) -> Mapping[str, str]:
        """The environment of the training runs."""
        return os.environ | {"OMP_NUM_THREADS": str(self.machine.threads_per_process)}

    def data_inputs(self) -> dict[str, Any]:
        """What determines tokenizer and corpus."""
        vocab_size = from_yaml(self.root / self.recipe(DMTD)).model.vocab_size
        python = sys.version if "stdlib" in self.inputs else ""
        documents = {"documents": list(self.inputs), **self.stories_inputs()}
        return documents | {"python": python, "heldout": self.heldout_fraction, "vocab_size": vocab_size}

    def stories_inputs(self) -> dict[str, Any]:
        """What determines the stories; nothing if there are none."""
        if STORIES not in self.inputs:
            return {}
        return {"stories": self.stories, "grammar": sha256_of_file(Path(__file__).with_name("stories.py"))}

    def train_inputs(self, model: str) -> dict[str, Any]:
        """What determines one training run."""
        names = (model,) if model == BASE else (BASE, model)
        settings = [sorted(to_dict(self.config(name)).items()) for name in names]
        digest = sha256_of_text(repr(settings))
        return self.data_inputs() | {"settings": digest}

    def decoding_inputs(self) -> dict[str, Any]:
        """What determines the decodings."""
        trained = {model: self.train_inputs(model) for model in MODELS}
        sampling = {"temperature": self.temperature, "top_p": self.top_p}
        return {
            "models": trained,
            "prompts": self.prompts,
            "new_tokens": self.new_tokens,
            "timed_runs": self.timed_runs,
        } | sampling

    def large_fields(self) -> dict[str, Any]:
        """The large model as a `config.json` describes it."""
        parallel, sequential = self.large_layers
        return {**LARGE_FIELDS, "num_parallel_layers": parallel, "num_sequential_layers": sequential}

    def large_inputs(self) -> dict[str, Any]:
        """What determines the measurement of the large model."""
        return {"fields": self.large_fields(), "timed_runs": self.timed_runs, "cores": self.machine.num_cores}
