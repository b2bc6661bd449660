"""Weights of a decoder, fused for decoding: from an export of ours, or from a Qwen3 or Llama directory (vanilla).

One matrix gives q, k and v; one gives gate and up. Weights are read tensor by tensor, each once, and every name and shape is
accounted for. Nothing here knows of requests or caches.

Shape legend: X hidden size, H query heads, G key/value heads, E head size, I feed-forward size, V vocabulary, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import LlamaConfig, Qwen3Config

from megatron_dmtd.cycle import ORDINARY, VANILLA, VARIANTS, Method
from megatron_dmtd.errors import CheckpointError, ConfigError, Refusal
from megatron_dmtd.hf.configuration_dmtd_qwen3 import DMTDQwen3Config
from megatron_dmtd.hf.dmtd_layers import RotaryAngles
from megatron_dmtd.inference.config import require_directory
from megatron_dmtd.infra.json_files import read_object

_NO_MODEL = Refusal(CheckpointError, required="a Hugging Face model directory", remedy="name such a directory")

CONFIGS = {"dmtdqwen3": DMTDQwen3Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
#: name -> tensor, called once for every name of `tensor_shapes`
ReadTensor = Callable[[str], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What the arithmetic of a decoder depends on."""

    num_layers: int
    num_parallel_layers: int
    """0 for a vanilla model."""
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    has_qk_norm: bool
    has_bias: bool
    """Biases of q, k, v and o."""
    is_tied: bool
    """The output head is the embedding table."""
    max_position_embeddings: int

    @property
    def query_size(self) -> int:
        """Width of q."""
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Width of k, and of v."""
        return self.num_key_value_heads * self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One layer. Matrices are `[out, in]`."""

    input_norm_X: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm_E: torch.Tensor | None
    k_norm_E: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm_X: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    @property
    def matrices(self) -> tuple[torch.Tensor, ...]:
        """What a pass over the layer reads."""
        return (self.qkv, self.o, self.gate_up, self.down)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights:
    """A whole decoder."""

    shape: ModelShape
    method: Method
    embedding_VX: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_X: torch.Tensor
    head_VX: torch.Tensor
    angles: RotaryAngles
    stop_token_ids: tuple[int, ...]
    """Tokens that end a text, as the directory says."""
    directory: Path | None
    """Where its tokenizer may be; None for a model made in memory."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations and caches. Matrices are of the same type, or bfloat16 under fp32 activations."""
        return self.final_norm_X.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding_VX.device

    def rotary_tables(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines `[T, E]` of positions from 0."""
        cos_1TE, sin_1TE = self.angles(torch.arange(num_positions, device=self.device)[None], self.dtype)
        return cos_1TE[0].contiguous(), sin_1TE[0].contiguous()


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every stored weight; the names are Qwen3's, and Llama's."""
    hidden, inner, query, key = shape.hidden_size, shape.intermediate_size, shape.query_size, shape.key_size
    names: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not shape.is_tied:
        names["lm_head.weight"] = (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        for name, out_size, in_size in (("q", query, hidden), ("k", key, hidden), ("v", key, hidden), ("o", hidden, query)):
            names[f"{prefix}self_attn.{name}_proj.weight"] = (out_size, in_size)
            if shape.has_bias:
                names[f"{prefix}self_attn.{name}_proj.bias"] = (out_size,)
        if shape.has_qk_norm:
            names |= {f"{prefix}self_attn.{name}_norm.weight": (shape.head_dim,) for name in "qk"}
        names |= {f"{prefix}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        names[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
        names |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return names


def build_model(
    config: Any,
    read: ReadTensor,
    *,
    variant: str | None = None,
    directory: Path | None = None,
    stop_token_ids: tuple[int, ...] = (),
) -> ModelWeights:
    """Fuse the weights that `read` gives.

    Args:
        config: A `DMTDQwen3Config`, or transformers' `Qwen3Config` or `LlamaConfig`.
        read: Gives a tensor by its name, in the type and on the device to decode with.
        variant: "vanilla" to use a DMTD model's weights as an ordinary decoder. Default: what `config` says.
        directory: Where the tokenizer may be.
        stop_token_ids: Tokens that end a text.

    Raises:
        CheckpointError: The configuration has something that the engine does not compute.
        ConfigError: `variant` is not what these weights were trained as, nor vanilla.
    """
    method = _method(config, variant)
    shape = _shape(config, method)
    embedding_VX = read("model.embed_tokens.weight")
    return ModelWeights(
        shape=shape,
        method=method,
        embedding_VX=embedding_VX,
        layers=tuple(_layer(shape, layer, read) for layer in range(shape.num_layers)),
        final_norm_X=read("model.norm.weight"),
        head_VX=embedding_VX if shape.is_tied else read("lm_head.weight"),
        angles=_angles(config),
        stop_token_ids=stop_token_ids,
        directory=directory,
    )


def load_model(
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    matrix_dtype: torch.dtype | None = None,
    device: torch.device,
    variant: str | None = None,
) -> ModelWeights:
    """Read a model directory: an export of ours, or a Qwen3 or Llama model.

    Args:
        directory: The directory.
        dtype: Type of norms, biases, activations and caches.
        matrix_dtype: Type to keep matrices and embeddings in; default `dtype`.
        device: Where to.
        variant: See `build_model`.

    Raises:
        CheckpointError: The directory is not such a model, or its weights are not exactly those of its configuration.
        ConfigError: See `build_model`.
    """
    path = Path(directory)
    config = read_config(path)
    expected = tensor_shapes(model_shape(config, variant))
    files = _accounted_files(path, expected)

    def read(name: str) -> torch.Tensor:
        with safe_open(files[name], framework="pt") as stored:
            tensor = stored.get_tensor(name)
        return tensor.to(device=device, dtype=dtype if tensor.dim() == 1 or matrix_dtype is None else matrix_dtype)

    return build_model(config, read, variant=variant, directory=path, stop_token_ids=_stop_token_ids(path, config))


def read_config(path: Path) -> Any:
    """The configuration of a model directory.

    Raises:
        CheckpointError: There is none, or it is of a model that is not ours to decode.
    """
    require_directory(path)
    fields = read_object(path / "config.json", _NO_MODEL)
    model_type = fields.get("model_type")
    if model_type not in CONFIGS:
        raise CheckpointError(
            found=f"{path / 'config.json'} with model_type {model_type!r}",
            required=f"one of {sorted(CONFIGS)}",
            remedy="export the model first (tools/convert.py export)",
        )
    try:
        return CONFIGS[model_type](**fields)
    except Exception as error:  # transformers' checks raise errors of several kinds
        raise CheckpointError(
            found=f"{path / 'config.json'}, which {CONFIGS[model_type].__name__} refuses: {error}",
            required="a consistent configuration",
            remedy="export the model again",
        ) from error


def _method(config: Any, variant: str | None) -> Method:
    if not isinstance(config, DMTDQwen3Config):
        trained_as = VANILLA
    else:
        kind = (config.dmtd_history_mode, config.dmtd_block_attention)
        trained_as = next(name for name, other in VARIANTS.items() if other == kind)
    if variant not in (None, VANILLA, trained_as):
        raise ConfigError(
            found=f"variant {variant!r} for a model trained as {trained_as}",
            required=f"{trained_as!r}, or {VANILLA!r} to decode the same weights as an ordinary model",
            remedy="leave the variant out",
        )
    if VANILLA in (variant, trained_as):
        return ORDINARY
    return Method(
        variant=trained_as,
        cycle_length=config.mtp_horizon,
        mask_token_id=config.mask_token_id,
        num_parallel_layers=config.num_parallel_layers,
    )


def model_shape(config: Any, variant: str | None = None) -> ModelShape:
    """What the arithmetic of `config` depends on. Arguments and errors as `build_model`."""
    return _shape(config, _method(config, variant))


def _shape(config: Any, method: Method) -> ModelShape:
    is_qwen = isinstance(config, Qwen3Config)
    if config.hidden_act != "silu" or getattr(config, "mlp_bias", False):
        raise CheckpointError(
            found=f"hidden_act {config.hidden_act!r}, mlp_bias {getattr(config, 'mlp_bias', False)}",
            required="silu and no bias in the feed-forward layers",
            remedy="decode this model with transformers",
        )
    if getattr(config, "use_sliding_window", False):
        raise CheckpointError(
            found="sliding-window attention", required="full attention", remedy="decode this model with transformers"
        )
    return ModelShape(
        num_layers=config.num_hidden_layers,
        num_parallel_layers=method.num_parallel_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        has_qk_norm=bool(getattr(config, "qk_norm", is_qwen)),
        has_bias=bool(config.attention_bias),
        is_tied=bool(config.tie_word_embeddings),
        max_position_embeddings=config.max_position_embeddings,
    )


def _angles(config: Any) -> RotaryAngles:
    try:
        return RotaryAngles(config)
    except ValueError as error:
        raise CheckpointError(
            found=f"rotary embeddings that are refused: {error}", required="rotary embeddings that do not change with the length",
            remedy="decode this model with transformers",
        ) from error  # fmt: skip


def _layer(shape: ModelShape, layer: int, read: ReadTensor) -> LayerWeights:
    prefix = f"model.layers.{layer}."

    def attention(name: str) -> torch.Tensor:
        return read(f"{prefix}self_attn.{name}")

    has_bias, has_norm = shape.has_bias, shape.has_qk_norm
    return LayerWeights(
        input_norm_X=read(f"{prefix}input_layernorm.weight"),
        qkv=torch.cat([attention(f"{name}_proj.weight") for name in "qkv"]),
        qkv_bias=torch.cat([attention(f"{name}_proj.bias") for name in "qkv"]) if has_bias else None,
        q_norm_E=attention("q_norm.weight") if has_norm else None,
        k_norm_E=attention("k_norm.weight") if has_norm else None,
        o=attention("o_proj.weight"),
        o_bias=attention("o_proj.bias") if has_bias else None,
        post_norm_X=read(f"{prefix}post_attention_layernorm.weight"),
        gate_up=torch.cat([read(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up")]),
        down=read(f"{prefix}mlp.down_proj.weight"),
    )


def _accounted_files(path: Path, expected: Mapping[str, tuple[int, ...]]) -> dict[str, Path]:
    """The file of every expected tensor, after names and shapes have been checked."""
    files: dict[str, Path] = {}
    wrong: list[str] = []
    for file in _weight_files(path):
        for name, found in _stored_shapes(file):
            # A tied head may be stored once more; files of rotary frequencies are older exports'.
            if name == "lm_head.weight" and name not in expected:
                continue
            if expected.get(name) != found or name in files:
                wrong.append(f"{name} {list(found)} (required: {expected.get(name, 'absent')})")
            files[name] = file
    missing = sorted(expected.keys() - files.keys())
    if missing or wrong:
        raise CheckpointError(
            found=f"{path}: missing {missing[:5] or 'nothing'}, wrong {wrong[:5] or 'nothing'}",
            required=f"the {len(expected)} weights of its configuration, each once",
            remedy="export or download the model again",
        )
    return files


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_object(index, _NO_MODEL).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(
                found=f"{index} without a weight_map",
                required="the file of each weight",
                remedy="export or download the model again",
            )
        return [path / name for name in sorted(set(weight_map.values()))]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            found=f"no *.safetensors in {path}", required="weights as safetensors", remedy="export or convert the model"
        )
    return files


def _stored_shapes(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    try:
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - not a mapping
                yield name, tuple(stored.get_slice(name).get_shape())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            found=f"{file} cannot be read: {error}",
            required="whole safetensors files",
            remedy="export or download the model again",
        ) from error


def _stop_token_ids(path: Path, config: Any) -> tuple[int, ...]:
    """`eos_token_id` of the generation configuration, or else of the model's."""
    generation = path / "generation_config.json"
    found = read_object(generation, _NO_MODEL).get("eos_token_id") if generation.exists() else config.eos_token_id
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)
