#!/usr/bin/env python3
"""What HTTP costs: the same requests through the engine alone and through a server, in one run.

    python tools/bench/serve.py exported --clients 1 8 --threads 2
    python tools/bench/serve.py --clients 1 4 16 --rounds 5          (random weights, about 60 million of them)

Each client asks for `--tokens` greedy tokens, all at once. The engine alone gets them as one list; a server, which is a process
of its own, gets them over sockets, whole and streamed. The three take turns in every round; figures are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from megatron_dmtd.inference import EngineConfig, SamplingParams
from megatron_dmtd.infra.console import ending_quietly

# torch takes seconds, which help and refusals need not wait for
if TYPE_CHECKING:
    from megatron_dmtd.inference import Engine

SERVER = Path(__file__).parents[1] / "serve.py"
#: tokens for prompts
ROOM = 128

SIZE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_parallel_layers": 12,
    "num_sequential_layers": 4,
    "vocab_size": 258,
    "mask_token_id": 257,
    "max_position_embeddings": 4096,
}
PROMPT = "What HTTP costs: the same requests through the engine alone, "


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", nargs="?", type=Path, help="directory of a model (default: one of random weights)")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128, help="of each output (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="one more is not counted (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="of either engine (default: torch's)")
    parser.add_argument("--json", help="file to write all figures to")
    return parser.parse_args(argv)


def save_random_model(folder: Path) -> Path:
    """Random weights, and a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from megatron_dmtd.hf import DMTDQwen3Config, DMTDQwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    torch.manual_seed(0)
    DMTDQwen3ForCausalLM(DMTDQwen3Config(**SIZE)).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", mask_token="<mask>").save_pretrained(folder)
    return folder


@contextlib.contextmanager
def served(folder: Path, num_clients: int, options: argparse.Namespace) -> Iterator[str]:
    """A server; the address of its completions."""
    import torch

    command = [sys.executable, "-W", "ignore", str(SERVER), str(folder), "--port", "0", "--device", "cpu"]
    command += ["--max-batch", str(num_clients), "--max-length", str(options.tokens + ROOM)]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().split()[-1] + "/completions"
        finally:
            server.terminate()


async def ask(url: str, num_clients: int, num_tokens: int, *, stream: bool) -> float:
    """Seconds until all clients have all of their tokens."""
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as client:

        async def one(number: int) -> None:
            fields = {
                "prompt": f"{PROMPT}{number}",
                "max_tokens": num_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": stream,
            }
            async with client.stream("POST", url, json=fields) as answer:
                answer.raise_for_status()
                async for _ in answer.aiter_lines():
                    pass

        start = time.perf_counter()
        await asyncio.gather(*(one(number) for number in range(num_clients)))
        return time.perf_counter() - start


def alone(engine: Engine, num_clients: int, num_tokens: int) -> float:
    """Seconds of the engine."""
    prompts = [engine.tokenizer(f"{PROMPT}{number}")["input_ids"] for number in range(num_clients)]
    start = time.perf_counter()
    engine.generate(prompts, max_new_tokens=num_tokens, params=SamplingParams(ignore_eos=True))
    return time.perf_counter() - start


def measure(folder: Path, num_clients: int, options: argparse.Namespace) -> dict[str, float]:
    """Medians of tokens per second, by interface."""
    from megatron_dmtd.inference import Engine

    config = EngineConfig(max_batch=num_clients, max_length=options.tokens + ROOM)
    own = Engine(folder, config, device="cpu")
    found: dict[str, list[float]] = {"engine": [], "server, whole": [], "server, streamed": []}
    with served(folder, num_clients, options) as url:
        for _ in range(options.rounds + 1):
            found["engine"].append(alone(own, num_clients, options.tokens))
            found["server, whole"].append(asyncio.run(ask(url, num_clients, options.tokens, stream=False)))
            found["server, streamed"].append(asyncio.run(ask(url, num_clients, options.tokens, stream=True)))
    return {name: num_clients * options.tokens / statistics.median(seconds[1:]) for name, seconds in found.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0."""
    options = arguments(argv)
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or save_random_model(Path(scratch))
        for num_clients in options.clients:
            figures = measure(folder, num_clients, options)
            results.append({"clients": num_clients, **figures})
            shown = ", ".join(f"{name} {speed:.1f} ({speed / figures['engine']:.2f})" for name, speed in figures.items())
            print(f"{num_clients} clients, {options.tokens} tokens each, tokens/s (of the engine's): {shown}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
