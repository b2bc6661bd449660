"""New weights for a running engine, as one stream of (Hugging Face's name, tensor), written over the old ones in place.

A stream gives one tensor at a time, so that a model need not fit into memory twice. A mapping is checked completely before
anything changes. A stream can only be checked as it arrives: if it turns out to be wrong, the tensors so far have been written,
and the engine must not decode until a complete one has been taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megatron_dmtd.architecture import decoder_tensors
from megatron_dmtd.errors import CheckpointError, DMTDError
from megatron_dmtd.families import hf_name
from megatron_dmtd.families.names import HEAD
from megatron_dmtd.inference.weights import ModelWeights

Tensors = Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor]


class WeightUpdate:
    """One update of a model, tensor by tensor. Use it as `WeightUpdate(model).take(tensors)`."""

    def __init__(self, model: ModelWeights) -> None:
        self.model = model
        decoder = model.schedule.decoder
        self._own_names = {hf_name(name): name for name in decoder_tensors(decoder)}
        self._shapes = {hf_name(name): shape.shape for name, shape in decoder_tensors(decoder).items()}
        self._is_tied = decoder.tie_word_embeddings
        self._taken: set[str] = set()

    @property
    def has_begun(self) -> bool:
        """Whether a tensor has been written."""
        return bool(self._taken)

    def take(self, tensors: Tensors) -> None:
        """Overwrite every weight. Types are converted.

        Raises:
            CheckpointError: A name is unknown, missing, or comes twice, or a tensor has another shape.
        """
        if isinstance(tensors, Mapping):
            self._check([(name, tuple(tensor.shape)) for name, tensor in tensors.items()])
            self._check_complete(tensors.keys())
            tensors = tensors.items()
        with torch.no_grad():
            for name, tensor in tensors:
                self._check([(name, tuple(tensor.shape))])
                self._write(name, tensor)
        self._check_complete(self._taken)

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._taken:
            raise self._refusal(f"{name} twice")
        if name == HEAD and self._is_tied:
            return  # the embedding table once more
        self._taken.add(name)
        self.model.places[self._own_names[name]](tensor)

    def _check(self, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        for name, shape in shapes:
            if name == HEAD and self._is_tied:
                continue
            if name not in self._shapes:
                raise self._refusal(f"{name}, which the model has not")
            if shape != self._shapes[name]:
                raise self._refusal(f"{name} of shape {list(shape)}, where the model has {list(self._shapes[name])}")

    def _check_complete(self, names: Iterable[str]) -> None:
        missing = sorted(self._shapes.keys() - set(names))
        if missing:
            raise self._refusal(f"{len(missing)} tensors missing, among them {', '.join(missing[:3])}")

    def _refusal(self, found: str) -> CheckpointError:
        remedy = "stream the weights of the same model"
        if self.has_begun:
            remedy += "; until then the engine does not decode, since its weights are a mixture now"
        return CheckpointError(
            found=f"weights for an update with {found}",
            required=f"the {len(self._shapes)} tensors of the engine's own model, each once, under Hugging Face's names",
            remedy=remedy,
        )


def incomplete(error: BaseException) -> CheckpointError:
    """The refusal of an engine until it has complete weights again."""
    reason = error.found if isinstance(error, DMTDError) else f"{type(error).__name__}: {error}"
    return CheckpointError(
        found=f"weights of which an update replaced only a part ({reason})",
        required="all tensors of one model",
        remedy="call update_weights again with a complete stream",
    )
