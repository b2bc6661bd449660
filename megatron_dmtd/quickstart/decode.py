"""Continue held-out prompts with the exported models, in cycles and as ordinary decoders, and measure both.

Samples are drawn with a temperature: greedy decoding of a small model repeats itself. Speed compares the same weights in cycles
and as an ordinary decoder, one prompt at a time, in this process, on the same device and threads, in alternation, so that other
load on the machine affects both. A forward pass of transformers over the whole text checks what was decoded greedily.

Shape legend: N tokens of a text, V vocabulary.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megatron_dmtd.data.batches.token_file import TokenFile
from megatron_dmtd.errors import DataError
from megatron_dmtd.inference import Engine, EngineConfig, SamplingParams
from megatron_dmtd.infra.files import write_atomically
from megatron_dmtd.platform import Platform
from megatron_dmtd.quickstart.parts import progress_bar
from megatron_dmtd.quickstart.plan import CONTROL, DMTD, MODELS, Plan

PROMPT_TOKENS = 22  # ends inside a cycle of four, as most prompts do


def heldout_prompts(prefix: str, *, count: int, num_tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """The first `num_tokens` tokens of `count` longer held-out documents. Raises `DataError` if there are not enough of them."""
    file = TokenFile(prefix)
    long_enough = [index for index, length in enumerate(file.document_lengths_U) if length > num_tokens]
    if len(long_enough) < count:
        raise DataError(
            found=f"{len(long_enough)} held-out documents of more than {num_tokens} tokens in {prefix}",
            required=f"{count}, to continue their beginnings",
            remedy="give more documents, or longer ones",
        )
    return [file.read(index, 0, num_tokens).tolist() for index in long_enough[:count]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """An exported model: in the engine, and loaded as any user of transformers loads it."""

    engine: Engine
    model: Any
    tokenizer: Any
    platform: Platform


def load(directory: Path, platform: Platform) -> Decoder:
    """The model in `directory`, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import megatron_dmtd.hf  # noqa: F401 - registers the DMTD models

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model = model.to(platform.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    return Decoder(engine=load_engine(directory, platform), model=model, tokenizer=tokenizer, platform=platform)


def load_engine(directory: Path, platform: Platform, *, variant: str | None = None) -> Engine:
    """An engine for one prompt at a time, without prefix caching."""
    config = EngineConfig(max_batch=1, prefix_caching=False)
    return Engine(directory, config, device=str(platform.device), variant=variant)


def generate(engine: Engine, prompt: list[int], *, new_tokens: int, eos_token_id: int) -> tuple[list[int], float]:
    """Exactly `new_tokens` greedy tokens after `prompt`, EOS forbidden, and the seconds they took."""
    params = SamplingParams(ignore_eos=True, logit_bias={eos_token_id: -math.inf})
    started = time.perf_counter()
    tokens = [event.token_id for event in engine.stream(prompt, max_new_tokens=new_tokens, params=params)]
    return tokens, time.perf_counter() - started


@torch.inference_mode()
def agreement(decoder: Decoder, prompt: list[int], continuation: list[int]) -> int:
    """Number of decoded tokens that are also the top choice of one teacher-forced forward pass, EOS excluded as in decoding."""
    ids_1N = torch.tensor([prompt + continuation], device=decoder.platform.device)
    logits_NV = decoder.model(input_ids=ids_1N).logits[0, len(prompt) - 1 : -1]
    logits_NV[:, decoder.tokenizer.eos_token_id] = -torch.inf
    return int((logits_NV.argmax(dim=-1).cpu() == torch.tensor(continuation)).sum())


def _time(engines: dict[str, Engine], prompt: list[int], eos_token_id: int, plan: Plan, bar: tqdm) -> dict[str, list[float]]:
    """Tokens per second of each timed decoding, by model."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for run in range(plan.timed_runs + 1):
        for name, engine in engines.items():
            _, seconds = generate(engine, prompt, new_tokens=plan.new_tokens, eos_token_id=eos_token_id)
            if run > 0:  # the first one warms up
                rates[name].append(plan.new_tokens / seconds)
            bar.update()
    return rates


def _sample(engine: Engine, prompts: list[list[int]], plan: Plan) -> list[str]:
    """A continuation of each prompt, up to EOS or the length cap."""
    params = [
        SamplingParams(temperature=plan.temperature, top_p=plan.top_p, seed=seed, detokenize=True) for seed in range(len(prompts))
    ]
    return [done.text or "" for done in engine.generate(prompts, max_new_tokens=plan.new_tokens, params=params)]


def _continue(decoder: Decoder, prompts: list[list[int]], plan: Plan, bar: tqdm) -> dict[str, Any]:
    agreeing = 0
    for prompt in prompts:
        ids, _ = generate(decoder.engine, prompt, new_tokens=plan.new_tokens, eos_token_id=decoder.tokenizer.eos_token_id)
        agreeing += agreement(decoder, prompt, ids)
        bar.update()
    texts = _sample(decoder.engine, prompts, plan)
    return {"continuations": texts, "agreeing": agreeing, "parameters": decoder.model.num_parameters()}


def decode_all(plan: Plan, platform: Platform, *, output: Path) -> None:
    """Time the decoding, continue the prompts, and write `output` (JSON)."""
    # Matrices this small do not benefit from more threads, and on a busy machine threads waiting for each other cost tenfold.
    torch.set_num_threads(1)
    prompts = heldout_prompts(plan.heldout_prefix, count=plan.prompts)
    decoders = {name: load(plan.export_directory(name), platform) for name in MODELS}
    cycled = decoders[DMTD]
    ordinary = load_engine(plan.export_directory(DMTD), platform, variant="vanilla")
    total = len(MODELS) * (plan.timed_runs + 1 + len(prompts))
    with progress_bar(total=total, unit="run", desc="  decoding") as bar:
        rates = _time({DMTD: cycled.engine, CONTROL: ordinary}, prompts[0], cycled.tokenizer.eos_token_id, plan, bar)
        models = {name: _continue(decoder, prompts, plan, bar) for name, decoder in decoders.items()}
    for name in MODELS:
        models[name] |= {"tokens_per_s": statistics.median(rates[name]), "tokens_per_s_runs": rates[name]}
    record = {
        "prompts": [cycled.tokenizer.decode(prompt) for prompt in prompts],
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": plan.new_tokens,
        "temperature": plan.temperature,
        "top_p": plan.top_p,
        "device": platform.describe(),
        "models": models,
    }
    write_atomically(output, json.dumps(record, indent=2) + "\n")
