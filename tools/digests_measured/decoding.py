"""What the engine and the model code for transformers make of tiny models of random weights."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .figures import Items, MeasureError, number, tensor, under
from .tree import KINDS, VARIANTS, Tree

TINY = {"hidden": 64, "inner": 96, "heads": 4, "groups": 2, "width": 16, "layers": 5, "vocabulary": 128}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_CONFIG: dict[str, Any] = {
    "vocab_size": TINY["vocabulary"],
    "hidden_size": TINY["hidden"],
    "intermediate_size": TINY["inner"],
    "num_hidden_layers": TINY["layers"],
    "num_attention_heads": TINY["heads"],
    "num_key_value_heads": TINY["groups"],
    "head_dim": TINY["width"],
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": _ROPE,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
}
_CYCLES = {"mtp_horizon": 4, "num_parallel_layers": 3, "num_sequential_layers": 2, "mask_token_id": 127, "qk_norm": True}


def hf_config(kind: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a tiny model; for "llama" that of an ordinary decoder without norms of q and k."""
    if kind == "llama":
        return _CONFIG | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "mlp_bias": False} | changes
    if kind == "vanilla":
        return _CONFIG | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]} | changes
    block, _, history = kind.partition("-")
    modes = {"dmtd_history_mode": "real" if history == "refresh" else "shadow", "dmtd_block_attention": block}
    return _CONFIG | _CYCLES | modes | {"model_type": "dmtdqwen3", "architectures": ["DMTDQwen3ForCausalLM"]} | changes


def _tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, width = TINY["hidden"], TINY["inner"], TINY["width"]
    query, key = TINY["heads"] * width, TINY["groups"] * width
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (TINY["vocabulary"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (TINY["vocabulary"], hidden)
    for layer in range(TINY["layers"]):
        own: dict[str, tuple[int, ...]] = {}
        for name, out_size, in_size in (("q", query, hidden), ("k", key, hidden), ("v", key, hidden), ("o", hidden, query)):
            own[f"self_attn.{name}_proj.weight"] = (out_size, in_size)
            if config["attention_bias"]:
                own[f"self_attn.{name}_proj.bias"] = (out_size,)
        if config["model_type"] != "llama" and config.get("qk_norm", True):
            own |= {f"self_attn.{name}_norm.weight": (width,) for name in "qk"}
        own |= {f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")} | {"mlp.down_proj.weight": (hidden, inner)}
        own |= {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return shapes


def write_model(directory: Path, kind: str, **changes: Any) -> Path:
    """A model directory of random weights, the same for all kinds, whose logits spread widely."""
    from safetensors.torch import save_file

    config = hf_config(kind, **changes)
    weights = {}
    for name, shape in _tensor_shapes(config).items():
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        noise = np.random.default_rng(seed).standard_normal(shape)
        values = noise * 2 / np.sqrt(shape[-1]) if len(shape) == 2 else noise * 0.2 + (not name.endswith("bias"))
        weights[name] = torch.from_numpy(values).float()
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """A model and how an engine decodes it."""

    kind: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its config.json."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `EngineConfig`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of `Engine`."""


_NATIVE, _TORCH = {"kernels": "native"}, {"kernels": "torch"}
#: So few pages that requests have to preempt each other.
_CROWDED = {"max_length": 104, "cache_tokens": 112}
DECODINGS = {
    **{f"{kind}/native": Decoding(kind=kind, config=_NATIVE) for kind in KINDS},
    **{f"{kind}/torch": Decoding(kind=kind, config=_TORCH) for kind in KINDS},
    **{f"{kind}/static-shapes": Decoding(kind=kind, config=_TORCH | {"cuda_graphs": "shapes"}) for kind in KINDS},
    **{f"{kind}/crowded": Decoding(kind=kind, config=_NATIVE | _CROWDED) for kind in VARIANTS},
    "causal-refresh/free-heads": Decoding(kind="causal-refresh", config=_NATIVE | {"align_heads": False}),
    "causal-refresh/as-vanilla": Decoding(kind="causal-refresh", config=_NATIVE, options={"variant": "vanilla"}),
    "causal-refresh/bfloat16-matrices": Decoding(kind="causal-refresh", config=_NATIVE, options={"matrix_dtype": "bfloat16"}),
    "causal-refresh/bfloat16": Decoding(kind="causal-refresh", options={"dtype": "bfloat16"}),
    "bidirectional-refresh/float64": Decoding(kind="bidirectional-refresh", options={"dtype": "float64"}),
    "bidirectional-refresh/tied-no-norms": Decoding(
        kind="bidirectional-refresh", changes={"qk_norm": False, "tie_word_embeddings": True}, config=_NATIVE
    ),
    "llama/biases-and-llama3-rope": Decoding(
        kind="llama",
        changes={
            "attention_bias": True,
            "rope_parameters": _ROPE | _LLAMA3 | {"original_max_position_embeddings": 64},
        },
        config=_NATIVE,
    ),
    "vanilla/yarn-rope": Decoding(
        kind="vanilla",
        changes={"rope_parameters": _ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
        config=_NATIVE,
    ),
}
PROMPT_LENGTHS = (1, 3, 4, 7, 18, 70, 33)


def prompts(vocabulary: int = TINY["vocabulary"] - 1) -> list[list[int]]:
    """Token ids of prompts of mixed lengths, never the last id of the vocabulary, MASK."""
    generator = np.random.default_rng(5)
    return [generator.integers(0, vocabulary, size=length).tolist() for length in PROMPT_LENGTHS]


def _choice_items(choices: Sequence[Any]) -> Items:
    values = [[choice.logprob, *(value for _, value in choice.top_logprobs)] for choice in choices]
    tops = [token for choice in choices for token, _ in choice.top_logprobs]
    return {"logprobs": tensor(torch.tensor(values, dtype=torch.float64)), "top-tokens": " ".join(map(str, tops))}


def completion_items(completions: Sequence[Any]) -> Items:
    """Tokens of each completion, why it ended, and its log probabilities where they were asked for."""
    found: Items = {}
    for index, completion in enumerate(completions):
        if completion.refusal is not None:
            raise MeasureError(f"a request was refused: {completion.refusal}")
        own = {"tokens": " ".join(map(str, completion.token_ids)), "finish-reason": completion.finish_reason}
        if completion.logprobs:
            own |= _choice_items(completion.logprobs)
        if completion.prompt_logprobs:
            own |= under("prompt", _choice_items(completion.prompt_logprobs))
        found |= under(f"request-{index}", own)
    return found


def decoding_items(directory: Path, decoding: Decoding) -> Items:
    """Greedy and sampled tokens, log probabilities, scores and prefix hits of one engine. Runs in a process of its own."""
    from megatron_dmtd.inference import Engine, EngineConfig, SamplingParams

    # Which kernel multiplies matrices of many rows is measured: with a clock that stands still, they always tie.
    time.thread_time = time.process_time = time.perf_counter = lambda: 0.0  # type: ignore[assignment]
    sizes = {"max_batch": 4, "max_length": 160, "cache_tokens": 1024, "chunk_tokens": 48, "page_size": 16}
    engine = Engine(directory, EngineConfig(**(sizes | dict(decoding.config))), device="cpu", **decoding.options)
    ids, items = prompts(), {}

    def served(name: str, texts: list[list[int]], *, max_new_tokens: int = 14, **params: Any) -> list[Any]:
        done = engine.generate(texts, max_new_tokens=max_new_tokens, params=SamplingParams(**params))
        items.update(under(name, completion_items(done)))
        stats = engine.stats
        items[f"{name}/work"] = (
            f"{stats.num_steps} steps, {stats.num_parallel_passes} parallel passes, {stats.num_prompt_tokens} tokens of prompts, "
            f"{stats.num_new_tokens} new tokens, {stats.num_preemptions} preemptions"
        )
        return done

    first = served("greedy", ids)
    longer = [[*prompt, *done.token_ids, 11, 12] for prompt, done in zip(ids, first, strict=True)]
    served("after-cached-prefixes", longer, logprobs=3, repetition_penalty=1.3)
    sampling = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.001, "presence_penalty": 0.2, "frequency_penalty": 0.1}
    served("sampled", ids, seed=7, n=2, logprobs=1, stop_token_ids=(5, 9), logit_bias={3: 1.5}, **sampling)
    served("scores", ids, max_new_tokens=0, prompt_logprobs=2)
    served("long", [ids[5][start : start + 9] for start in range(4)], max_new_tokens=40, repetition_penalty=1.2)
    return items


def engine_items(tree: Tree, name: str) -> Items:
    """What an engine makes of a tiny model."""
    decoding = DECODINGS[name]
    directory = write_model(tree.scratch / f"model-{name.replace('/', '-')}", decoding.kind, **decoding.changes)
    return tree.computed(lambda: decoding_items(directory, decoding))


def hf_items(directory: Path, *, vocabulary: int) -> Items:
    """Logits, loss, gradients and generated tokens in transformers. Runs in a process of its own."""
    from transformers import AutoModelForCausalLM

    import megatron_dmtd.hf  # noqa: F401 - registers the model

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    generator = np.random.default_rng(6)
    ids = torch.from_numpy(generator.integers(0, vocabulary, size=(2, 23)))
    output = model(ids, labels=ids, use_cache=False)
    output.loss.backward()
    gradients = {name: tensor(weight.grad) for name, weight in model.named_parameters() if weight.grad is not None}
    items = {"logits": tensor(output.logits), "loss": number(output.loss.item())} | under(
        "gradients", dict(sorted(gradients.items()))
    )
    mask = torch.ones_like(ids)
    mask[0, :5] = 0  # the phases of the two rows differ
    common = {"attention_mask": mask, "max_new_tokens": 14, "pad_token_id": vocabulary, "eos_token_id": None}

    def generated(name: str, **options: Any) -> None:
        torch.manual_seed(3)
        rows = model.generate(ids, **common, **options)[:, ids.shape[1] :]
        items.update({f"{name}/row-{index}": " ".join(map(str, row)) for index, row in enumerate(rows.tolist())})

    with torch.no_grad():
        items["padded-logits"] = tensor(model(ids, attention_mask=mask).logits[mask.bool()])
        generated("greedy", do_sample=False)
        generated("varied", do_sample=False, repetition_penalty=2.0)
        generated("sampled", do_sample=True, temperature=0.8, top_k=40)
    return items


def hf_model_items(tree: Tree, kind: str) -> Items:
    """The model code for transformers on the tiny model of a kind."""
    directory = write_model(tree.scratch / f"hf-{kind}", kind)
    return tree.computed(lambda: hf_items(directory, vocabulary=TINY["vocabulary"] - 1))
