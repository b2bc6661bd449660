"""The fields of a `config.json`. Each is accounted for: read, known to change no number, or refused by name.

A reader takes the fields that it knows; `finish` then names every remaining one that asks for something. So a setting that a
newer writer has added, and that changes what the model computes, cannot be overlooked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_dmtd.errors import ModelError

#: Fields that change no number: names, types, special tokens, options of training and of transformers itself.
#: `pretraining_tp` only cuts the same products into slices.
WITHOUT_EFFECT = frozenset({
    "architectures", "auto_map", "model_type", "torch_dtype", "dtype", "transformers_version", "name_or_path", "use_cache",
    "pretraining_tp", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id",
    "decoder_start_token_id", "attn_implementation", "return_dict", "output_hidden_states", "output_attentions",
    "torchscript", "id2label", "label2id", "num_labels", "problem_type", "tokenizer_class", "task_specific_params",
    "finetuning_task", "chunk_size_feed_forward", "gradient_checkpointing", "is_llama_config", "transformers.js_config",
    "prefix", "use_bfloat16", "tf_legacy_loss", "max_length", "min_length", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
})  # fmt: skip


def refuse(faults: list[str], *, required: str) -> None:
    """Raise `ModelError` for all faults together, if there are any."""
    if faults:
        raise ModelError(
            found="; ".join(faults),
            required=required,
            remedy="use a model without these, or correct config.json if it does not describe its weights",
        )


def is_silent(value: Any) -> bool:
    """Whether a value asks for nothing: null, false, or an empty list or object."""
    return value is None or value is False or value in ([], {})


class Fields:
    """A reader of one object of settings."""

    def __init__(self, fields: Mapping[str, Any], *, name: str = "") -> None:
        """`name`: that of the object inside its file, such as `rope_parameters`; empty for the file itself."""
        self._fields, self._name = dict(fields), name
        self._taken: set[str] = set()
        self.faults: list[str] = []
        """Everything found wrong so far; `finish` raises it in one error."""

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def shown(self, name: str) -> str:
        """The field's name as a message has it."""
        return f"{self._name}.{name}" if self._name else name

    def take(self, name: str, default: Any = None) -> Any:
        """The value, unchanged; `default` if it is absent. Null is a value."""
        self._taken.add(name)
        return self._fields.get(name, default)

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer. Anything else is a fault, as is absence without a default."""
        value = self.take(name, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        self._fault_of_type(name, value, "an integer")
        return 0 if default is None else default

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """An integer or null."""
        return None if self.take(name, default) is None else self.integer(name, default)

    def number(self, name: str, default: float | None = None) -> float:
        """A number. Anything else is a fault, as is absence without a default."""
        value = self.take(name, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        self._fault_of_type(name, value, "a number")
        return 1.0 if default is None else default

    def optional_number(self, name: str) -> float | None:
        """A number or null; None if it is absent."""
        return None if self.take(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        """True or false; null means the default."""
        value = self.take(name, default)
        if isinstance(value, bool):
            return value
        if value is not None:
            self._fault_of_type(name, value, "true or false")
        return default

    def table(self, name: str) -> dict[str, Any]:
        """An object of settings; empty if it is absent or null."""
        value = self.take(name)
        if value is None or isinstance(value, dict):
            return value or {}
        self._fault_of_type(name, value, "an object")
        return {}

    def strings(self, name: str) -> list[str] | None:
        """A list of strings; None if it is absent or null."""
        value = self.take(name)
        if value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            return value
        self._fault_of_type(name, value, "a list of names")
        return None

    def require(self, name: str, *, accepted: tuple[Any, ...]) -> None:
        """A fault unless the field is absent, or has one of the accepted values: others are not computed here."""
        if name in self and self.take(name) not in accepted:
            self.faults.append(f"{self.shown(name)} {self._said(name)}")

    def missing(self, *names: str) -> list[str]:
        """A fault for each of `names` that is absent or null."""
        found = [f"no {self.shown(name)}" for name in names if self._fields.get(name) is None]
        self.faults += found
        return found

    def leftovers(self, without_effect: frozenset[str] = frozenset()) -> list[str]:
        """A fault for each field that has not been taken and asks for something."""
        return [
            f"{self.shown(name)} {self._said(name)}"
            for name, value in self._fields.items()
            if name not in self._taken | without_effect and not name.startswith("_") and not is_silent(value)
        ]

    def finish(self, *, required: str) -> None:
        """Raise `ModelError` for all faults, including fields that have not been taken."""
        refuse(self.faults + self.leftovers(WITHOUT_EFFECT), required=required)

    def _said(self, name: str) -> str:
        value = self._fields[name]
        return str(value).lower() if isinstance(value, bool) else repr(value)

    def _fault_of_type(self, name: str, value: Any, expected: str) -> None:
        found = f"no {self.shown(name)}" if value is None else f"{self.shown(name)} {value!r}, which is not {expected}"
        if found not in self.faults:
            self.faults.append(found)
