"""One piece of work, on a pretended GPU or, to compare with, on the CPU: `python -m ... WORK FOLDER SETTINGS`.

SETTINGS are JSON. FOLDER/result.json is what came of it. The pretended GPU is used where PRETEND_GPU_LIBRARY is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.support import pretend_gpu

import torch  # isort: skip - after what it is to find

ON_GPU = pretend_gpu.LIBRARY in os.environ
PROMPTS = [[1 + (3 * number + index) % 50 for index in range(length)] for number, length in enumerate((1, 6, 33, 16, 47, 2))]


def _attention_by_definition(q: Any, k: Any, v: Any, *, block_mask: Any, enable_gqa: bool) -> torch.Tensor:
    """In place of FlexAttention's compiled kernels: the same sum, over all pairs of slots."""
    from torch.nn.attention.flex_attention import create_mask

    assert block_mask.kv_num_blocks.device == q.device
    mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device=q.device)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=enable_gqa)


def train(folder: Path, sections: dict[str, dict[str, Any]], variant: str) -> dict[str, Any]:
    """A run from its corpora to its last checkpoint. The values of its log."""
    from megatron_dmtd.attention import flex
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training.log import read_metrics
    from megatron_dmtd.training.loop import run_training
    from tests.support.tiny import tiny_config

    platform = prepare_megatron()
    if ON_GPU:
        from megatron.core.tensor_parallel import random

        flex.flex_attention = _attention_by_definition
        random._get_cuda_rng_state, random._set_cuda_rng_state = lambda *_, **__: torch.get_rng_state(), lambda *_, **__: None
    defaults = {
        "model": {"head_dim": 16},
        "data": {"train": (str(folder / "train"),), "valid": (str(folder / "valid"),)},
        "checkpoint": {"dir": str(folder / "checkpoints"), "interval": 2},
        "logging": {"dir": str(folder / "log")},
    }
    names = {*defaults, *sections}
    config = tiny_config(variant, **{name: defaults.get(name, {}) | sections.get(name, {}) for name in names})
    run_training(config, platform)
    return {"device": str(platform.device), "metrics": read_metrics(folder / "log" / "metrics.jsonl")}


def decode(folder: Path, kind: str) -> dict[str, Any]:
    """Greedy and drawn tokens of a model in the engine, each step recorded as a CUDA graph would be."""
    from megatron_dmtd.inference import Engine, EngineConfig, SamplingParams, runner

    if ON_GPU:
        runner.GraphRecorder = _Recorder
    config = EngineConfig(max_batch=5, max_length=128, cache_tokens=640, chunk_tokens=24, kernels="torch")
    engine = Engine(folder / kind, config, dtype="float64")
    drawn = SamplingParams(
        ignore_eos=True, temperature=0.8, top_k=20, top_p=0.95, min_p=0.01, presence_penalty=0.1, logit_bias={3: 1.0}, logprobs=2
    )
    tokens = []
    for params in (SamplingParams(ignore_eos=True, repetition_penalty=5.0), drawn):
        completions = engine.generate(PROMPTS, max_new_tokens=12, params=params)
        tokens.append([completion.token_ids for completion in completions])
    recorded = pretend_gpu.Capture.num_operations
    return {"device": str(engine.model.device), "tokens": tokens, "recorded": recorded}


class _Recorder:
    """In place of `GraphRecorder`: computes again at each replay what a graph would repeat, after checking that it could."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda", device

    def __call__(self, compute: Any) -> Any:
        with pretend_gpu.Capture():
            compute()
        return compute


def generate(folder: Path, kind: str, layers_on_first: int) -> dict[str, Any]:
    """Logits, a gradient and tokens of transformers' model, its first layers on one GPU and the rest on another."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module
    from transformers import AutoModelForCausalLM

    import megatron_dmtd.hf  # noqa: F401 - registers the models

    model: Any = AutoModelForCausalLM.from_pretrained(folder / kind, dtype=torch.float64)
    first, last = ("cuda:0", "cuda:1") if ON_GPU else ("cpu", "cpu")
    places = {"embed_tokens": first, "norm": last} | {
        f"layers.{layer}": first if layer < layers_on_first else last for layer in range(len(model.model.layers))
    }
    for name, place in places.items():  # as accelerate does for a device_map, which looks for real GPUs
        add_hook_to_module(model.model.get_submodule(name).to(place), AlignDevicesHook(execution_device=place))
    add_hook_to_module(model.lm_head.to(last), AlignDevicesHook(execution_device=last))
    add_hook_to_module(model, AlignDevicesHook(execution_device=first, io_same_device=True))
    ids = torch.tensor([PROMPTS[3], PROMPTS[3][::-1]], device=first)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    output = model(ids, attention_mask=mask, labels=ids)
    output.loss.backward()
    gradient = model.get_input_embeddings().weight.grad
    options = {"attention_mask": mask, "max_new_tokens": 10, "eos_token_id": None, "pad_token_id": 0, "repetition_penalty": 5.0}
    tokens = [model.generate(ids, num_beams=beams, do_sample=False, **options).tolist() for beams in (1, 3)]
    return {"device": str(gradient.device), "loss": float(output.loss), "gradient": gradient.tolist(), "tokens": tokens}


def convert(folder: Path) -> dict[str, Any]:
    """From a model to a checkpoint of Megatron's and back, on a machine that has a GPU."""
    from megatron_dmtd.conversion.convert import export_hf, import_hf
    from megatron_dmtd.platform import prepare_megatron

    platform = prepare_megatron()
    import_hf(folder / "model", folder / "imported")
    export_hf(folder / "imported", folder / "exported")
    return {"device": str(platform.device)}


def main() -> None:
    works = {"train": train, "convert": convert, "decode": decode, "generate": generate}
    work, folder, settings = works[sys.argv[1]], Path(sys.argv[2]), sys.argv[3]
    if ON_GPU:
        pretend_gpu.install(num_gpus=2 if work is generate else 1)
    with pretend_gpu.PretendedMachine() if ON_GPU else contextlib.nullcontext():
        result = work(folder, **json.loads(settings))
    if os.environ.get("RANK", "0") == "0":
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
