"""New weights for a running engine, as one stream of (Hugging Face's name, tensor), written over the old ones in place.

Every name, shape and type is accounted for, and all faults are named at once. A stream is read to its end even then: where it is
gathered from several ranks, the others would wait forever.

Tensors are staged: nothing is written before all of them are known to be right. Without staging, a model need not fit into
memory twice, but a stream that turns out to be wrong leaves a mixture, and the engine must not decode until a complete one has
been taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from megatron_dmtd.architecture import decoder_tensors
from megatron_dmtd.errors import CheckpointError, DMTDError, shown
from megatron_dmtd.families import hf_name
from megatron_dmtd.families.names import HEAD, TABLE
from megatron_dmtd.inference.weights import ModelWeights

Tensors = Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor]
#: Others hold no numbers, or numbers that need a scale.
_TYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
#: Faults of one kind named in a message.
_MAX_NAMED = 3


class WeightUpdate:
    """One update of a model. Use it as `WeightUpdate(model, staging=True).take(tensors)`."""

    def __init__(self, model: ModelWeights, *, staging: bool) -> None:
        self.model, self.staging = model, staging
        self.has_begun = False
        """Whether a tensor has been written."""
        decoder = model.schedule.decoder
        self._own_names = {hf_name(name, decoder): name for name in decoder_tensors(decoder)}
        self._shapes = {hf_name(name, decoder): shape.shape for name, shape in decoder_tensors(decoder).items()}
        self._allowed = self._shapes | ({HEAD: self._shapes[TABLE]} if decoder.tie_word_embeddings else {})
        """With the second name of a tied head, which may come if its numbers are those of the table."""
        self._seen: set[str] = set()
        self._faults: dict[str, list[str]] = {}
        """By kind."""

    def take(self, tensors: Tensors) -> None:
        """Overwrite every weight. Types are converted.

        Raises:
            CheckpointError: A name is unknown, missing, or comes twice, a tensor has another shape or no floating-point numbers,
                or a tied head differs from its table.
        """
        if isinstance(tensors, Mapping):
            self._write_checked(dict(self._right_ones(tensors.items())))
        elif self.staging:
            # Copies: a stream may use its buffers again.
            self._write_checked({name: tensor.detach().clone() for name, tensor in self._right_ones(tensors)})
        else:
            self._write_at_once(tensors)

    def _write_checked(self, staged: Mapping[str, torch.Tensor]) -> None:
        if HEAD in staged and HEAD not in self._shapes and TABLE in staged:
            self._check_head(staged[HEAD], staged[TABLE])
        self._require_all()
        for name in self._shapes:
            self._write(name, staged[name])

    def _write_at_once(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        head: torch.Tensor | None = None
        for name, tensor in self._right_ones(tensors):
            if name not in self._shapes:
                head = tensor.detach().clone()
            elif not self._faults:
                self._write(name, tensor)
        if head is not None:
            self._check_head(head, self.model.embedding_VX)
        self._require_all()

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        self.has_begun = True
        with torch.no_grad():
            self.model.places[self._own_names[name]](tensor)

    # Faults.

    def _right_ones(self, tensors: Iterable[object]) -> Iterator[tuple[str, torch.Tensor]]:
        """What of a stream can be taken. The rest is noted."""
        for item in tensors:
            match item:
                case (str() as name, torch.Tensor() as tensor):
                    if self._is_right(name, tensor):
                        yield name, tensor
                case _:
                    self._note("no pair of a name and a tensor", shown(item))

    def _is_right(self, name: str, tensor: torch.Tensor) -> bool:
        """Account for one tensor. Whatever is wrong with it is noted."""
        if name not in self._allowed:
            return self._note("unknown", shown(name))
        if name in self._seen:
            return self._note("twice", name)
        self._seen.add(name)
        if tuple(tensor.shape) != self._allowed[name]:
            return self._note(
                "wrong shape", f"{name} of shape {list(tensor.shape)}, where the model has {list(self._allowed[name])}"
            )
        if tensor.dtype not in _TYPES:
            return self._note("wrong type", f"{name} of {tensor.dtype}")
        return True

    def _check_head(self, head: torch.Tensor, table: torch.Tensor) -> None:
        own = self.model.embedding_VX
        if not torch.equal(*(tensor.to(device=own.device, dtype=own.dtype) for tensor in (head, table))):
            self._note("a tied head with other numbers than its table", HEAD)

    def _note(self, kind: str, fault: str) -> bool:
        self._faults.setdefault(kind, []).append(fault)
        return False

    def _require_all(self) -> None:
        """Raise `CheckpointError` unless every tensor has come, once, and right."""
        for name in sorted(self._shapes.keys() - self._seen):
            self._note("missing", name)
        if not self._faults:
            return
        remedy = "stream the weights of the same model"
        if self.has_begun:
            remedy += "; until then the engine does not decode, since its weights are a mixture now"
        raise CheckpointError(
            found="weights for an update: " + "; ".join(_named(kind, own) for kind, own in self._faults.items()),
            required=f"the {len(self._shapes)} tensors of the engine's own model, each once, under Hugging Face's names",
            remedy=remedy,
        )


def _named(kind: str, faults: list[str]) -> str:
    more = f" and {len(faults) - _MAX_NAMED} more" if len(faults) > _MAX_NAMED else ""
    return f"{kind}: {', '.join(faults[:_MAX_NAMED])}{more}"


def incomplete(error: BaseException) -> CheckpointError:
    """The refusal of an engine until it has complete weights again."""
    reason = error.found if isinstance(error, DMTDError) else f"{type(error).__name__}: {error}"
    return CheckpointError(
        found=f"weights of which an update replaced only a part ({reason})",
        required="all tensors of one model",
        remedy="call update_weights again with a complete stream",
    )
