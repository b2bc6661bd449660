"""Each family from end to end: a directory by transformers, imported, trained on Megatron, exported, loaded, decoded, scored.

Level: greedy tokens equal, log probabilities within 1e-4 in fp32, between the engine and the export loaded in transformers.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import megatron_dmtd.hf  # noqa: F401 - registers dmtdqwen3
from megatron_dmtd.config import CycleConfig
from megatron_dmtd.conversion.convert import export_hf, import_hf
from megatron_dmtd.inference import Engine, EngineConfig, SamplingParams, score
from tests.families.transformers_models import model_of, saved
from tests.support.jobs import run_job
from tests.support.ranks import run_ranks
from tests.support.tiny import MASK, tiny_config, write_corpus

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "mistral": ("mistral", {"sliding_window": 6, "head_dim": 16}),  # a width that the native kernels take
    "llama3-scaling": ("llama", {"rope_parameters": LLAMA3, "attention_bias": True}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN, "head_dim": 16}),
}
METHODS = {
    "vanilla": None,
    "causal-norefresh": CycleConfig(variant="causal-norefresh", num_parallel_layers=3, mask_token_id=MASK),
    "bidirectional-refresh": CycleConfig(variant="bidirectional-refresh", num_parallel_layers=2, mask_token_id=MASK),
}
PROMPTS = [list(range(5, 5 + length)) for length in (1, 6, 11, 20)]


def trained(folder: Path, family: str, method: str) -> tuple[Path, Path]:
    """The directory that a family's author would publish, and what two steps of training make of it."""
    model_type, fields = FAMILIES[family]
    source = saved(folder / "published", model_of(model_type, **fields))
    start = import_hf(source, folder / "start", cycle=METHODS[method])
    config = tiny_config(
        data={"train": (write_corpus(folder / "corpus", num_documents=20),)},
        training={"steps": 2, "global_batch_size": 2},
        optimizer={"warmup_steps": 0, "lr": 1e-3, "min_lr": 1e-4},
        checkpoint={"dir": str(folder / "run"), "init_from": str(folder / "start"), "asynchronous": False},
    )
    config = dataclasses.replace(config, model=start.model, cycle=start.cycle)
    ((ended, _, _),) = run_ranks(1, run_job, config)
    assert ended == "done"
    export_hf(folder / "run", folder / "export")
    return source, folder / "export"


@pytest.mark.multiprocess
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_trained_converted_and_decoded(tmp_path, family, method):
    source, export = trained(tmp_path, family, method)
    eager = {"attn_implementation": "eager"}
    published, slow = (AutoModelForCausalLM.from_pretrained(path, **eager).eval() for path in (source, export))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(published.state_dict()[name], slow.state_dict()[name]), "training must have changed something"
    if method == "vanilla":
        assert type(slow) is type(published)
    engine = Engine(export, EngineConfig(max_batch=4, max_length=96, cache_tokens=512, chunk_tokens=24), device="cpu")
    params = SamplingParams(ignore_eos=True)
    found = [list(completion.token_ids) for completion in engine.generate(PROMPTS, max_new_tokens=14, params=params)]
    for prompt, tokens in zip(PROMPTS, found):
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = slow.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
        assert tokens == expected, len(prompt)
        text = [*prompt, *tokens]
        with torch.no_grad():
            logprobs = slow(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(1, torch.tensor(text)[1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(score(engine, text)), own, rtol=0, atol=1e-4)
