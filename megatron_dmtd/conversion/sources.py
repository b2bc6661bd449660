"""A model to convert from or compare: a Hugging Face directory or a training checkpoint, behind one interface.

Opening one accounts for every tensor. For a Hugging Face directory this reads only configurations and headers; for a checkpoint,
unless told otherwise, all bytes, to compare them with its checksums.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from megatron_dmtd.config import Config, CycleConfig, ModelConfig
from megatron_dmtd.config.validate import validate_model
from megatron_dmtd.conversion.progress import byte_bar
from megatron_dmtd.errors import CheckpointError
from megatron_dmtd.families import ModelDescription, read_directory
from megatron_dmtd.infra import checksums
from megatron_dmtd.training.checkpoints.paths import DAMAGED, find_step_directory, must_be_verified
from megatron_dmtd.weights.checkpoint_files import saved_config
from megatron_dmtd.weights.hf_directory import HFWeights
from megatron_dmtd.weights.megatron_names import Rule, check_megatron, hf_specs, megatron_specs, rules
from megatron_dmtd.weights.specs import TensorSpec
from megatron_dmtd.weights.torch_dist import CheckpointTensors


class Source(Protocol):
    """What conversions require of a model on disk."""

    kind: str
    """Its format, in words."""
    directory: Path
    description: ModelDescription
    model: ModelConfig
    cycle: CycleConfig
    stored: Mapping[str, TensorSpec]
    """Its tensors as they are stored."""

    def hf_specs(self) -> dict[str, TensorSpec]:
        """Its tensors under Hugging Face's names, a tied head left out."""

    def hf(self, rule: Rule) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of one rule, under Hugging Face's names."""


def num_parameters(source: Source) -> int:
    """Parameters as stored; a checkpoint's vocabulary is padded."""
    return sum(math.prod(spec.shape) for spec in source.stored.values())


class HFDirectory:
    """A Hugging Face directory of a Qwen3, Llama or DMTD decoder."""

    kind = "Hugging Face directory"

    def __init__(self, directory: str | Path) -> None:
        """Raises `ModelError`, `ConfigError` or `ConversionError` if it is no such model, or a tensor is not accounted for."""
        self.directory = Path(directory)
        self.description = read_directory(self.directory)
        self.model, self.cycle = self.description.model, self.description.cycle
        weights = HFWeights(self.directory, self.description.decoder)
        self._files, self.stored = weights.files, weights.stored
        self._rules = {rule.megatron_name: rule for rule in rules(self.description.decoder)}
        self._joined: defaultdict[TensorSpec, deque[torch.Tensor]] = defaultdict(lambda: deque(maxlen=2))

    def hf_specs(self) -> dict[str, TensorSpec]:
        """See `Source`."""
        return {name: self.stored[name] for rule in self._rules.values() for name, _ in rule.hf}

    def hf(self, rule: Rule) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Source`."""
        for name, _ in rule.hf:
            yield name, self._files.read(name)

    def megatron_specs(self) -> dict[str, TensorSpec]:
        """Its tensors under Megatron's names."""
        return megatron_specs(self.description.decoder, self.stored)

    def megatron(self, megatron_name: str) -> torch.Tensor:
        """One tensor under Megatron's name: the stored one if it is the same, else read part by part into its place.

        Its memory is reused for the second one after it of the same shape: new memory for each layer costs more than the reading.
        """
        rule = self._rules[megatron_name]
        if rule.megatron_shapes[0] == rule.hf[0][1]:
            return self._files.mapped(rule.hf[0][0])
        return rule.join(self._files.read_into, self._room(rule))

    def _room(self, rule: Rule) -> torch.Tensor:
        shape, dtype = rule.megatron_shapes[0], self.stored[rule.hf[0][0]].dtype
        if not rule.is_of_a_layer:
            return torch.empty(shape, dtype=dtype)
        used = self._joined[TensorSpec(shape, dtype)]
        used.append(used[0] if len(used) == 2 else torch.empty(shape, dtype=dtype))
        return used[-1]


class Checkpoint:
    """A training checkpoint of any layout, or the newest one of a run."""

    kind = "training checkpoint"

    def __init__(self, path: str | Path, *, verify: bool = True) -> None:
        """`verify`: first compare all bytes with the checkpoint's checksums. Only an import may be without checksums.

        Raises `CheckpointError` or `ConversionError` if there is none, a file is damaged, or not every tensor is accounted for.
        """
        self.directory = find_step_directory(path)
        if verify and must_be_verified(self.directory):
            _verify(self.directory)
        self.config: Config = saved_config(self.directory)
        self.description = ModelDescription(model=self.config.model, cycle=self.config.cycle)
        self.model, self.cycle = self.config.model, self.config.cycle
        validate_model(self.model)
        self._tensors = CheckpointTensors(self.directory)
        self.stored: Mapping[str, TensorSpec] = self._tensors.specs
        check_megatron(self.description.decoder, self.stored)

    def hf_specs(self) -> dict[str, TensorSpec]:
        """See `Source`."""
        return hf_specs(self.description.decoder, self.stored)

    def hf(self, rule: Rule) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Source`."""
        return rule.split(self.megatron(rule.megatron_name))

    def megatron(self, megatron_name: str) -> torch.Tensor:
        """One tensor under Megatron's names."""
        return self._tensors.read(megatron_name)


class _GivenUpError(Exception):
    """The verdict is no longer needed: the work that needed it has failed."""


@contextmanager
def verified_meanwhile(path: str | Path, *, verify: bool = True) -> Iterator[tuple[Checkpoint, Callable[[], None]]]:
    """A checkpoint whose weights are compared with its checksums while the block works with them.

    Gives the checkpoint and a function that waits for the verdict, to be called before the result becomes visible: it raises
    `CheckpointError` if a file is damaged. Everything but the weights is compared first. `verify`: see `Checkpoint`.
    """
    directory = find_step_directory(path)
    if not (verify and must_be_verified(directory)):
        yield Checkpoint(directory, verify=False), lambda: None
        return
    checksums.verify(directory, DAMAGED, select=lambda name: not _holds_weights(name))
    checkpoint, given_up = Checkpoint(directory, verify=False), threading.Event()

    def on_bytes(count: int) -> None:
        if given_up.is_set():
            raise _GivenUpError
        bar.update(count)

    with byte_bar(f"checking {directory.name}", checksums.num_bytes(directory, DAMAGED)) as bar, ThreadPoolExecutor(1) as thread:
        verdict = thread.submit(checksums.verify, directory, DAMAGED, select=_holds_weights, on_bytes=on_bytes)
        try:
            yield checkpoint, verdict.result
        except CheckpointError:
            verdict.result()  # damaged bytes explain it better
            raise
        finally:
            given_up.set()


def _holds_weights(file_name: str) -> bool:
    return file_name.endswith(".distcp")


def _verify(directory: Path) -> None:
    with byte_bar(f"checking {directory.name}", checksums.num_bytes(directory, DAMAGED)) as bar:
        checksums.verify(directory, DAMAGED, on_bytes=bar.update)


def is_hf_directory(path: str | Path) -> bool:
    """Whether a folder is taken for a Hugging Face directory rather than a checkpoint or a run."""
    return (Path(path) / "config.json").is_file()


def open_source(path: str | Path, *, verify: bool = True) -> HFDirectory | Checkpoint:
    """The model in `path`, whichever format it has. `verify`: see `Checkpoint`."""
    return HFDirectory(path) if is_hf_directory(path) else Checkpoint(path, verify=verify)
