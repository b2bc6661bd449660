"""Model directories for the engine: exports of ours, and models of every family that `families` knows.

Weights are read tensor by tensor, each once, after every name and shape has been accounted for.
"""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_dmtd.architecture import Schedule, make_schedule
from megatron_dmtd.cycle import ORDINARY, VANILLA
from megatron_dmtd.errors import CheckpointError, ConfigError, Refusal
from megatron_dmtd.families import ModelDescription, hf_name, read_fields, read_hf_fields
from megatron_dmtd.inference.config import require_directory
from megatron_dmtd.inference.loops import KVMode, scheduled_with
from megatron_dmtd.inference.weights import ModelWeights, build_model
from megatron_dmtd.infra.json_files import read_object
from megatron_dmtd.weights.hf_directory import HFWeights

_NO_MODEL = Refusal(CheckpointError, required="a Hugging Face model directory", remedy="name such a directory")
#: What transformers assumes as the end of a text if a `config.json` does not name it; nothing for other families.
_DEFAULT_STOP = {"llama": 2, "mistral": 2}


def load_model(
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    matrix_dtype: torch.dtype | None = None,
    device: torch.device,
    variant: str | None = None,
    num_loops: int | None = None,
    kv_mode: KVMode | None = None,
) -> ModelWeights:
    """Read a model directory.

    Args:
        directory: The directory.
        dtype: Type of norms, biases, activations and caches.
        matrix_dtype: Type to keep matrices and embeddings in; default `dtype`.
        device: Where to.
        variant: "vanilla" to use a DMTD model's weights as an ordinary decoder. Default: as it was trained.
        num_loops: How often looped layers run. Default: as the model says.
        kv_mode: What is cached of looped layers. Default: as the model says.

    Raises:
        ModelError: Its configuration is missing, or of a model that is not computed here.
        ConversionError: The weights are damaged, or not exactly those of the configuration.
        CheckpointError: There is no such directory.
        ConfigError: `variant` is not what the weights were trained as, nor vanilla; or `num_loops` or `kv_mode` is impossible.
    """
    path = Path(directory)
    description = read_model_directory(path)
    schedule = scheduled_with(scheduled_as(description, variant), num_loops, kv_mode)
    stored = HFWeights(path, description.decoder, any_type=True)
    return build_model(
        schedule,
        lambda name: stored.read(hf_name(name, description.decoder)),
        dtype=dtype,
        matrix_dtype=matrix_dtype,
        device=device,
        stop_token_ids=_stop_token_ids(path),
        directory=path,
    )


def read_model_directory(path: Path) -> ModelDescription:
    """What a model directory describes. Raises `CheckpointError` if there is none, and as `families.read_fields`."""
    require_directory(path)
    return read_fields(read_hf_fields(path))


def scheduled_as(description: ModelDescription, variant: str | None) -> Schedule:
    """The schedule that a model was trained with, or that of an ordinary decoder. Raises `ConfigError` for any other."""
    trained_as = description.method.variant
    if variant not in (None, VANILLA, trained_as):
        raise ConfigError(
            found=f"variant {variant!r} for a model trained as {trained_as}",
            required=f"{trained_as!r}, or {VANILLA!r} to decode the same weights as an ordinary model",
            remedy="leave the variant out",
        )
    return make_schedule(description.decoder, ORDINARY) if variant == VANILLA else description.schedule


def _stop_token_ids(path: Path) -> tuple[int, ...]:
    """`eos_token_id` of the generation configuration, or else of the model's."""
    generation = path / "generation_config.json"
    if generation.exists():
        found = read_object(generation, _NO_MODEL).get("eos_token_id")
    else:
        fields = read_hf_fields(path)
        found = fields.get("eos_token_id", _DEFAULT_STOP.get(fields["model_type"]))
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)
