#!/usr/bin/env python3
"""Text in, text out.

    python tools/generate.py exported "def main():" --max-new-tokens 128
    python tools/generate.py exported "Once upon a time" --temperature 0.8 --top-p 0.95 --n 3 --seed 7 --stats
    python tools/generate.py exported --prompts prompts.txt --no-stream      (one prompt per line)
    echo "Once upon a time" | python tools/generate.py exported --prompts -
    python tools/generate.py exported "..." --vanilla                        (the same weights as an ordinary decoder)
    python tools/generate.py dory "..." --hf-overrides '{"n_recurrent_loops": 2, "recurrent_kv_cache_mode": "last_loop"}'

A single prompt with one sample is streamed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dmtd.errors import DataError, DMTDError
from megatron_dmtd.inference import EngineConfig, SamplingParams
from megatron_dmtd.inference.config import require_directory
from megatron_dmtd.inference.loop_options import add_loop_options, loop_arguments
from megatron_dmtd.infra.console import ending_quietly

# torch and transformers take seconds, which help and refusals need not wait for
if TYPE_CHECKING:
    from megatron_dmtd.inference import Completion, Engine

#: the sampling options: name, type, what it does
_SAMPLING: tuple[tuple[str, type, str], ...] = (
    ("temperature", float, "0 picks the most likely token; otherwise logits are divided by it"),
    ("top-k", int, "sample from the k most likely tokens; 0: from all"),
    ("top-p", float, "sample from the most likely tokens that together reach this probability"),
    ("min-p", float, "drop tokens less likely than this fraction of the most likely one's probability"),
    ("seed", int, "random seed: the same seed gives the same output"),
    ("n", int, "outputs per prompt; they differ if the temperature is above 0"),
    ("repetition-penalty", float, "above 1, tokens of the prompt and the output become less likely"),
    ("presence-penalty", float, "subtracted from the logits of tokens in the output"),
    ("frequency-penalty", float, "the same, times the number of occurrences"),
)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", help="export, or Qwen3 or Llama directory, with its tokenizer")
    parser.add_argument("prompt", nargs="*", help="one or more prompts")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="file with further prompts, one per line; - is standard input"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="maximum tokens of an output (default: %(default)s)")
    for name, kind, text in _SAMPLING:
        default = getattr(SamplingParams(), name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (default: %(default)s)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="text that ends an output; may be repeated")
    parser.add_argument("--vanilla", action="store_true", help="decode a DMTD model's weights as an ordinary decoder")
    add_loop_options(parser)
    parser.add_argument("--max-batch", type=int, default=8, help="outputs to decode at once (default: %(default)s)")
    parser.add_argument(
        "--max-length", type=int, help="maximum tokens of a prompt plus its output (default: the model's positions)"
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="type of weights and activations (default: %(default)s)",
    )
    parser.add_argument(
        "--matrix-dtype", choices=("float32", "bfloat16"), help="bfloat16: matrices take half the memory; arithmetic stays fp32"
    )
    parser.add_argument(
        "--bf16-products",
        action="store_true",
        help="multiply prompts and batches in bfloat16; for --matrix-dtype bfloat16 on CPUs with avx512_bf16 or AMX",
    )
    parser.add_argument("--device", help="for example cpu or cuda:1 (default: a GPU if there is one)")
    parser.add_argument("--no-stream", action="store_true", help="print outputs only when they are complete")
    parser.add_argument("--stats", action="store_true", help="print counts and speed to standard error")
    return parser.parse_args(argv)


def read_prompts(options: argparse.Namespace) -> list[str]:
    """All prompts. Raises `DataError` if there are none."""
    prompts = list(options.prompt)
    if options.prompts is not None:
        prompts += [line for line in _read(options.prompts).replace("\r\n", "\n").split("\n") if line]
    if not prompts:
        empty = "no prompt" if options.prompts is None else f"no prompt: --prompts {options.prompts} is empty"
        raise DataError(found=empty, required="at least one", remedy="give a prompt, or --prompts FILE with one per line")
    return prompts


def _read(path: Path) -> str:
    try:
        return (sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(found=f"{path}: {error}", required="a file of prompts in UTF-8", remedy="correct --prompts") from error


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """The sampling parameters."""
    return SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
        n=options.n,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        stop=tuple(options.stop),
        detokenize=True,
    )


def print_completion(prompt: str, completion: Completion) -> None:
    """One finished output, under its prompt."""
    print(f"--- {prompt!r}, sample {completion.sample}, {completion.finish_reason}")
    print(completion.text if completion.refusal is None else completion.refusal)


def print_stats(engine: Engine, seconds: float) -> None:
    """Counts and speed of the run."""
    stats = engine.stats
    reused = engine.prefix_index.num_reused_tokens if engine.prefix_index else 0
    print(
        f"{engine.method.variant}: {stats.num_new_tokens} tokens in {seconds:.2f} s, "
        f"{stats.num_new_tokens / seconds:.2f} tokens/s; "
        f"{stats.num_steps} steps, {stats.num_parallel_passes} of them through the parallel layers; "
        f"{stats.num_prompt_tokens} prompt tokens, {reused} reused, {stats.num_preemptions} preemptions; "
        f"kernels: {'native' if not engine.kernel_note else 'torch (' + engine.kernel_note + ')'}",
        file=sys.stderr,
    )


def run(options: argparse.Namespace) -> int:
    """Generate. Returns 1 if a prompt was refused."""
    prompts, params = read_prompts(options), sampling_params(options)
    params.check(sys.maxsize)  # what is wrong with any model
    config = EngineConfig(max_batch=options.max_batch, max_length=options.max_length, bf16_products=options.bf16_products)
    config.check()
    loops = loop_arguments(options)
    require_directory(Path(options.model))
    from megatron_dmtd.inference import Engine
    from megatron_dmtd.inference.text import encode, load_tokenizer

    tokenizer = load_tokenizer(Path(options.model))
    variant = "vanilla" if options.vanilla else None
    engine = Engine(
        options.model,
        config,
        dtype=options.dtype,
        matrix_dtype=options.matrix_dtype,
        device=options.device,
        variant=variant,
        **loops,
    )
    if engine.product_note:
        print(f"note: {engine.product_note}", file=sys.stderr)
    params.check(engine.model.schedule.decoder.vocab_size)  # the same for all prompts, so no single one is refused for it
    ids = [encode(tokenizer, prompt) for prompt in prompts]
    start = time.perf_counter()
    try:
        if len(prompts) == 1 and params.n == 1 and not options.no_stream:
            return stream(engine, prompts[0], ids[0], options.max_new_tokens, params)
        return complete(engine, prompts, ids, options.max_new_tokens, params)
    finally:
        if options.stats:
            print_stats(engine, time.perf_counter() - start)


def stream(engine: Engine, prompt: str, ids: list[int], max_new: int, params: SamplingParams) -> int:
    """Print the prompt, and its output as it is decoded."""
    events = engine.stream(ids, max_new_tokens=max_new, params=params)
    print(prompt, end="", flush=True)
    try:
        for event in events:
            print(event.text, end="", flush=True)
    finally:
        print()
    return 0


def complete(engine: Engine, prompts: list[str], ids: list[list[int]], max_new: int, params: SamplingParams) -> int:
    """Print each prompt with its finished outputs. Returns 1 if one was refused."""
    completions = engine.generate(ids, max_new_tokens=max_new, params=params)
    by_prompt = itertools.groupby(completions, key=lambda completion: completion.request_id)
    for prompt, (_, own) in zip(prompts, by_prompt, strict=True):
        for completion in own:
            print_completion(prompt, completion)
    return int(any(completion.refusal is not None for completion in completions))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 some prompts were refused, 2 refused (the message says what to change), 130 interrupted."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal cannot show must not stop the output
    try:
        return run(arguments(argv))
    except DMTDError as error:
        print(f"{type(error).__name__}\n{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
