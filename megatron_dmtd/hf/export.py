"""Write a model directory that loads anywhere: weights, configuration, tokenizer, and the code of the model as remote code.

`AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)` then needs torch and transformers only. Weights are
taken one after the other, so that no more than one shard of them is in memory here. This file knows no Megatron.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_dmtd.cycle import rule
from megatron_dmtd.errors import ConversionError
from megatron_dmtd.hf.configuration_dmtd_qwen3 import DMTDQwen3Config
from megatron_dmtd.hf.modeling_dmtd_qwen3 import DMTDQwen3ForCausalLM

SHARD_BYTES = 5 * 10**9
#: The code that travels. The rule of cycles comes from `cycle/rule.py`, verbatim, under the name that the others import.
CODE_FILES = ("configuration_dmtd_qwen3.py", "dmtd_slots.py", "dmtd_cache.py", "dmtd_layers.py", "modeling_dmtd_qwen3.py")
AUTO_MAP = {
    "AutoConfig": "configuration_dmtd_qwen3.DMTDQwen3Config",
    "AutoModel": "modeling_dmtd_qwen3.DMTDQwen3Model",
    "AutoModelForCausalLM": "modeling_dmtd_qwen3.DMTDQwen3ForCausalLM",
}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "*.model",
    "*.tiktoken",
)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

Tensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


def save_export(
    directory: str | Path,
    *,
    config: DMTDQwen3Config,
    tensors: Tensors,
    tokenizer_dir: str | Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `directory` whole, or leave it as it was.

    Args:
        directory: The target; absent or empty.
        config: Configuration of the model.
        tensors: Every weight by its Hugging Face name, as a mapping or as pairs in any order. With tied embeddings
            `lm_head.weight` may be left out; if present it must equal the embedding table.
        tokenizer_dir: Directory whose tokenizer files are copied.
        dtype: Type to store weights in. Default: as they come, which must then be one type.
        shard_bytes: Largest size of a weight file, in bytes; a single larger tensor still gets a file of its own.

    Raises:
        ConversionError: The target is not empty, the tokenizer is absent, or the weights are not exactly those of the model.
    """
    target = Path(directory)
    _refuse_used_target(target)
    tokenizer_files = _tokenizer_files(tokenizer_dir)
    if isinstance(tensors, Mapping):
        _check_names(expected_shapes(config), set(tensors) - ({HEAD} if config.tie_word_embeddings else set()))
        tensors = tensors.items()
    with _built_aside(target) as aside:
        stored = _Accounts(config, dtype)
        _write_weights(aside, stored.checked(tensors), shard_bytes)
        stored.close()
        _write_config(aside, config, stored.dtype)
        for file in (*_code_files(), *tokenizer_files):
            shutil.copyfile(file, aside / _exported_name(file))


def expected_shapes(config: DMTDQwen3Config) -> dict[str, torch.Size]:
    """Name and shape of every weight that an export of `config` stores."""
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in DMTDQwen3ForCausalLM(config).state_dict().items()}
    if config.tie_word_embeddings:
        del shapes[HEAD]
    return shapes


class _Accounts:
    """Every tensor exactly once, of the right shape and one type."""

    def __init__(self, config: DMTDQwen3Config, dtype: torch.dtype | None) -> None:
        self.expected = expected_shapes(config)
        self.is_tied = config.tie_word_embeddings
        self.dtype = dtype
        self.is_cast = dtype is not None
        self.seen: set[str] = set()
        self.tied: dict[str, torch.Tensor] = {}

    def checked(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            if name in self.seen:
                raise ConversionError(found=f"{name} twice", required="each weight once", remedy="mend the source of the weights")
            self.seen.add(name)
            if self.is_tied and name in (HEAD, EMBEDDING):
                self.tied[name] = tensor
                if name == HEAD:
                    continue
            yield name, self._accepted(name, tensor)

    def _accepted(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in self.expected:
            raise ConversionError(
                found=f"{name}, which is no weight of this model",
                required=f"the {len(self.expected)} weights of the configuration",
                remedy="export with the configuration that the weights were trained with",
            )
        if tensor.shape != self.expected[name]:
            raise ConversionError(
                found=f"{name} of shape {tuple(tensor.shape)}",
                required=f"{tuple(self.expected[name])}",
                remedy="export with the configuration that the weights were trained with; cut padded vocabulary rows first",
            )
        self.dtype = self.dtype or tensor.dtype
        if not self.is_cast and tensor.dtype != self.dtype:
            raise ConversionError(
                found=f"{name} of type {tensor.dtype} among {self.dtype}", required="one type", remedy="pass dtype to cast to"
            )
        return tensor.detach().to("cpu", self.dtype).contiguous()

    def close(self) -> None:
        """All weights came, and tied ones are equal."""
        _check_names(self.expected, self.seen - ({HEAD} if self.is_tied else set()))
        if len(self.tied) == 2 and not torch.equal(self.tied[HEAD].cpu(), self.tied[EMBEDDING].cpu()):
            raise ConversionError(
                found=f"{HEAD} differs from {EMBEDDING}",
                required="equal tensors, since the configuration ties them",
                remedy="export with tie_word_embeddings=False, or find out why the copies parted",
            )


def _check_names(expected: Mapping[str, torch.Size], names: set[str]) -> None:
    missing, unknown = sorted(expected.keys() - names), sorted(names - expected.keys())
    if missing or unknown:
        raise ConversionError(
            found=f"weights missing: {missing or 'none'}; not of this model: {unknown or 'none'}",
            required=f"exactly the {len(expected)} weights of the configuration",
            remedy="export with the configuration that the weights were trained with",
        )


def _refuse_used_target(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConversionError(
            found=f"{target} is in use", required="a directory that is absent or empty", remedy="choose another, or remove it"
        )


def _tokenizer_files(tokenizer_dir: str | Path | None) -> list[Path]:
    if tokenizer_dir is None:
        return []
    files = sorted({file for pattern in TOKENIZER_FILES for file in Path(tokenizer_dir).glob(pattern)})
    if not files:
        raise ConversionError(
            found=f"no tokenizer file in {tokenizer_dir}", required=f"some of {TOKENIZER_FILES}", remedy="correct tokenizer_dir"
        )
    return files


def _code_files() -> list[Path]:
    return [Path(__file__).with_name(name) for name in CODE_FILES] + [Path(rule.__file__)]


def _exported_name(file: Path) -> str:
    return "dmtd_cycles.py" if file == Path(rule.__file__) else file.name


@contextmanager
def _built_aside(target: Path) -> Iterator[Path]:
    """A new directory beside `target` that takes its place if all goes well, and is removed if not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        yield aside
        aside.chmod(0o755)  # mkdtemp's is 0o700
        aside.replace(target)  # an empty directory may stand there
    except BaseException:
        shutil.rmtree(aside)
        raise


def _write_weights(aside: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> None:
    """Safetensors files of at most `shard_bytes`, with an index if there is more than one."""
    shards: list[list[str]] = []
    total_bytes = 0
    for number, shard in enumerate(_shards(tensors, shard_bytes)):
        save_file(shard, aside / f"shard-{number}", metadata={"format": "pt"})
        shards.append(list(shard))
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
    if len(shards) == 1:
        (aside / "shard-0").rename(aside / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (aside / f"shard-{number}").rename(aside / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(aside / "model.safetensors.index.json", index)


def _shards(tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        yield shard


def _write_config(aside: Path, config: DMTDQwen3Config, dtype: torch.dtype | None) -> None:
    """`config.json`, readable by transformers 4 and 5, and `generation_config.json`."""
    fields = config.to_dict()
    for name in ("dtype", "_name_or_path", "id2label", "label2id"):  # set below; a path of this machine; of classifiers
        fields.pop(name, None)
    fields |= {
        "model_type": config.model_type,
        "architectures": ["DMTDQwen3ForCausalLM"],
        "auto_map": AUTO_MAP,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    rope = fields.get("rope_parameters")
    if rope:
        fields["rope_theta"] = rope["rope_theta"]  # transformers 4 and other runtimes read it here
        if rope["rope_type"] != "default":
            fields["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    _write_json(aside / "config.json", dict(sorted(fields.items())))
    special = {name: fields[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if fields.get(name) is not None}
    _write_json(aside / "generation_config.json", special)


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
