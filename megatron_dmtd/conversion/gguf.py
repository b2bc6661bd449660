"""GGUF files: read by the format's own library, dequantised to float32, every tensor and every setting accounted for.

The file's own lists of tensors and of metadata decide. What has no place in the model, or changes its numbers in a manner that is
not computed here, is refused by its name: readers that pass over a bias or a scaling silently make another model of the file.
The tokenizer is made by transformers.

Source: the GGUF specification of ggml, and the names of its Python package `gguf`.
"""

from __future__ import annotations

import importlib.util
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from megatron_dmtd.errors import CapabilityError, ConversionError
from megatron_dmtd.families import ModelDescription, hf_tensors, read_fields, write_fields
from megatron_dmtd.families.names import HEAD, TABLE
from megatron_dmtd.weights.safetensors_files import write_weights
from megatron_dmtd.weights.specs import TensorSpec

#: `general.architecture` -> Hugging Face's `model_type`. Mistral's files call themselves llama.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_REQUIRED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OPTIONAL = {"attention.head_count_kv": "num_key_value_heads", "rope.freq_base": "rope_theta"}
#: said again by other settings or by the tensors; compared with them
_REPEATED = ("vocab_size", "attention.key_length", "attention.value_length", "rope.dimension_count")
_SCALING = ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned")
#: what says nothing about the numbers: how the file was made, the tokenizer, parts of a split
_WITHOUT_EFFECT = ("general.", "tokenizer.", "quantize.", "split.", "GGUF.", "imatrix.")
#: the format's base of rotary frequencies where a file is silent
_DEFAULT_THETA = 10_000.0

_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WHOLE = {"token_embd.weight": TABLE, "output_norm.weight": "model.norm.weight", "output.weight": HEAD}
#: projections whose rows the format's llama files hold in pairs (interleaved rotation)
_INTERLEAVED = re.compile(r"blk\.\d+\.attn_(q|k)\.(weight|bias)")
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def gguf_file(path: str | Path) -> Path | None:
    """The GGUF file that `path` means: itself, or the only one of a directory without `config.json`; None if there is none.

    Raises `ConversionError` if a directory holds several.
    """
    path = Path(path)
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if (path / "config.json").is_file():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise ConversionError(
            found=f"{path} with {', '.join(file.name for file in found)}", required="one GGUF file", remedy="name the file itself"
        )
    return found[0] if found else None


def as_written(value: float) -> float:
    """The number that was meant by one that went through float32, as all of GGUF's do: 9.999999747378752e-06 is 1e-05."""
    single = numpy.float32(value)
    return float(str(single)) if float(single) == value else value


class GGUFModel:
    """A model in a GGUF file. Opening reads metadata and the list of tensors, and accounts for both."""

    def __init__(self, file: Path) -> None:
        """Raises `CapabilityError` without the package, and `ConversionError`, `ModelError` or `ConfigError` for a file that is
        cut, or that says something that has no place in the model.
        """
        if importlib.util.find_spec("gguf") is None:
            raise CapabilityError(found="no package gguf", required="gguf, which reads GGUF files", remedy="pip install gguf")
        import gguf

        self.file = file
        try:
            reader = gguf.GGUFReader(file)
            self._tensors = {str(tensor.name): tensor for tensor in reader.tensors}
            self._metadata = {name: field.contents() for name, field in reader.fields.items()}
        except (OSError, ValueError, KeyError, IndexError, AssertionError, struct.error) as error:
            raise self._refusal([f"{type(error).__name__}: {error}"], required="a whole GGUF file") from error
        self.description = self._describe()
        self._hf_names = self._account_for_tensors()

    def specs(self) -> dict[str, TensorSpec]:
        """Every tensor under Hugging Face's name, in the order of the layers."""
        return {name: TensorSpec(shape.shape, torch.float32) for name, shape in hf_tensors(self.description.decoder).items()}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors in that order, dequantised one at a time."""
        from gguf.quants import dequantize

        own_names = {hf: gguf_name for gguf_name, hf in self._hf_names.items()}
        for name, spec in self.specs().items():
            gguf_name = own_names[name]
            stored = self._tensors[gguf_name]
            numbers = numpy.array(dequantize(stored.data, stored.tensor_type), dtype=numpy.float32)
            tensor = torch.from_numpy(numbers.reshape(spec.shape))
            yield name, self._untwisted(gguf_name, tensor).contiguous()

    def special_ids(self) -> dict[str, int]:
        """Ids of the tokens that begin, end and pad text, as far as the file names them."""
        names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
        found = {name: self._metadata.get(f"tokenizer.ggml.{gguf_name}") for name, gguf_name in names.items()}
        return {name: int(value) for name, value in found.items() if value is not None}

    def _untwisted(self, gguf_name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Rows in Hugging Face's order: the first halves of a head's pairs, then the second ones."""
        match = _INTERLEAVED.fullmatch(gguf_name)
        if match is None or self._architecture != "llama":
            return tensor
        model = self.description.model
        heads = model.num_attention_heads if match[1] == "q" else model.num_key_value_heads
        return tensor.unflatten(0, (heads, model.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)

    # Settings.

    @property
    def _architecture(self) -> str:
        return str(self._metadata.get("general.architecture"))

    def _setting(self, name: str) -> Any:
        value = self._metadata.get(f"{self._architecture}.{name}")
        return as_written(value) if isinstance(value, float) else value

    def _describe(self) -> ModelDescription:
        if self._architecture not in ARCHITECTURES:
            raise self._refusal([f"general.architecture {self._architecture!r}"], required=f"one of {', '.join(ARCHITECTURES)}")
        faults = self._unknown_settings()
        faults += [f"no {self._architecture}.{name}" for name in _REQUIRED if self._setting(name) is None]
        faults += [f"no {name}" for name in ("token_embd.weight", "blk.0.attn_q.weight") if name not in self._tensors]
        if faults:
            raise self._refusal(faults, required="a model all of whose settings are known here")
        fields = {hf: self._setting(name) for name, hf in (_REQUIRED | _OPTIONAL).items() if self._setting(name) is not None}
        fields = {"rope_theta": _DEFAULT_THETA} | fields | self._rope_scaling()
        # As the projection has it: not every writer states the width of a head.
        head_dim = self._shape("blk.0.attn_q.weight")[0] // max(fields["num_attention_heads"], 1)
        vocab_size = self._shape("token_embd.weight")[0]
        fields |= {
            "model_type": ARCHITECTURES[self._architecture],
            "vocab_size": vocab_size,
            "head_dim": head_dim,
            "num_key_value_heads": fields.get("num_key_value_heads", fields["num_attention_heads"]),
            "tie_word_embeddings": "output.weight" not in self._tensors,
        }
        self._check_repeated(head_dim=head_dim, vocab_size=vocab_size)
        return read_fields(fields)

    def _unknown_settings(self) -> list[str]:
        """Every setting that says something and has no place here."""
        known = {f"{self._architecture}.{name}" for name in (*_REQUIRED, *_OPTIONAL, *_REPEATED, *_SCALING)}
        return [
            f"{name} {_shown(value)}"
            for name, value in self._metadata.items()
            if name not in known and not name.startswith(_WITHOUT_EFFECT) and value not in (None, False, 0, "none")
        ]

    def _rope_scaling(self) -> dict[str, Any]:
        kind, factor = self._setting("rope.scaling.type"), self._setting("rope.scaling.factor")
        if kind in (None, "none"):
            if factor not in (None, 0.0, 1.0):
                raise self._refusal([f"rope.scaling.factor {factor} without rope.scaling.type"], required="both, or neither")
            return {}
        scaling = {"rope_type": kind, "factor": factor}
        original = self._setting("rope.scaling.original_context_length")
        if kind == "yarn" and original is not None:
            scaling["original_max_position_embeddings"] = original
        return {"rope_scaling": scaling}

    def _check_repeated(self, *, head_dim: int, vocab_size: int) -> None:
        expected = {"vocab_size": vocab_size} | dict.fromkeys(_REPEATED[1:], head_dim)
        faults = [
            f"{self._architecture}.{name} {self._setting(name)}, where the rest of the file says {value}"
            for name, value in expected.items()
            if self._setting(name) not in (None, value)
        ]
        if faults:
            raise self._refusal(faults, required="heads of one width, rotated whole, and as many tokens as embeddings")

    # Tensors.

    def _shape(self, gguf_name: str) -> tuple[int, ...]:
        """The format lists dimensions from the innermost."""
        return tuple(int(size) for size in reversed(self._tensors[gguf_name].shape))

    def _account_for_tensors(self) -> dict[str, str]:
        """The Hugging Face name of each of the file's tensors. Raises `ConversionError` for whatever does not match."""
        expected = hf_tensors(self.description.decoder)
        names: dict[str, str] = {}
        faults = []
        for gguf_name in self._tensors:
            name = _hf_name(gguf_name)
            if name is None or name not in expected:
                faults.append(f"unknown: {gguf_name} {list(self._shape(gguf_name))}")
            elif self._shape(gguf_name) != expected[name].shape:
                faults.append(f"wrong shape: {gguf_name} is {list(self._shape(gguf_name))}, not {list(expected[name].shape)}")
            else:
                names[gguf_name] = name
        faults += [f"missing: {name}" for name in expected if name not in names.values()]
        if faults:
            raise self._refusal(faults, required="each tensor of the model once, and no other")
        return names

    def _refusal(self, faults: list[str], *, required: str) -> ConversionError:
        return ConversionError(
            found=f"{self.file} with {len(faults)} fault(s):\n  " + "\n  ".join(faults),
            required=required,
            remedy="download the file again, or import the safetensors of the same model",
        )


def _hf_name(gguf_name: str) -> str | None:
    if gguf_name in _WHOLE:
        return _WHOLE[gguf_name]
    match = _LAYER.fullmatch(gguf_name)
    if match is None or match[2] not in _PARTS:
        return None
    return f"model.layers.{match[1]}.{_PARTS[match[2]]}.{match[3]}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def write_as_hf_directory(file: Path, directory: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as an ordinary Hugging Face directory, with float32 weights.

    Raises as `GGUFModel`, and `ConversionError` if transformers cannot make the tokenizer.
    """
    from transformers import AutoTokenizer

    model = GGUFModel(file)
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (OSError, ValueError, KeyError, IndexError, RuntimeError, struct.error) as error:
        raise ConversionError(
            found=f"{file}, of whose tokenizer transformers makes nothing: {type(error).__name__}: {error}",
            required="a tokenizer that transformers knows",
            remedy="import the safetensors of the same model",
        ) from error
    fields = write_fields(model.description) | model.special_ids()
    (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    write_weights(directory, model.specs(), model)
    tokenizer.save_pretrained(directory)
