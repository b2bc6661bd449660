"""GGUF files, read by transformers: dequantised to float32, with the tokenizer that they carry.

Unlike every other conversion this holds the whole model in memory, since transformers does.
"""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path
from typing import Any

import numpy

from megatron_dmtd.errors import CapabilityError, ConversionError


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


def _restore_settings(config: Any) -> None:
    for name, value in config.to_dict().items():
        if isinstance(value, float):
            setattr(config, name, as_written(value))
        elif name == "rope_parameters":
            setattr(config, name, {key: as_written(v) if isinstance(v, float) else v for key, v in value.items()})


def write_as_hf_directory(file: Path, directory: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as an ordinary Hugging Face directory, with float32 weights.

    Raises `CapabilityError` without the packages that this needs, and `ConversionError` for a file that transformers cannot read.
    """
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise CapabilityError(
            found=f"no package {' and '.join(missing)}",
            required="gguf and accelerate, through which transformers reads GGUF files",
            remedy=f"pip install {' '.join(missing)}",
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            output_loading_info=True,
        )
        model, report = loaded
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (OSError, ValueError, KeyError, IndexError, RuntimeError, struct.error) as error:
        raise ConversionError(
            found=f"{file}: {type(error).__name__}: {error}",
            required="a whole GGUF file of an architecture that transformers knows",
            remedy="download it again, or import the safetensors of the same model",
        ) from error
    # transformers makes up what it does not find, and leaves out what it does not know
    faults = [f"{word}: {name}" for word in ("missing", "unexpected") for name in sorted(report[f"{word}_keys"])]
    if faults:
        raise ConversionError(
            found=f"{file} with {len(faults)} fault(s):\n  " + "\n  ".join(faults),
            required="each tensor of the model once",
            remedy="download it again, or import the safetensors of the same model",
        )
    _restore_settings(model.config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
