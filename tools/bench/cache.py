#!/usr/bin/env python3
"""Time cache operations (docs/cache_operations.md) against what they replace, on a model with random weights.

    python tools/bench/cache.py --cpu-time
    python tools/bench/cache.py --cases decode recovery --tokens 1024 --rounds 3 --json figures.json

decode      tokens/s after dropping half of a text, against a fresh, ordinary request of the other half
reposition  one reposition of --tokens tokens against a plain copy of their K and V, and against computing them; `copies` are the
            rotated copies alone, `request` is a warm request with the reposition minus the same without it
recovery    computing a text whose operations cut it into segments, against a plain prefill of it, nothing cached
eviction    tokens computed for two agents in turns, each under `RollingDrop`: with all the cache they need, and with a quarter of
            what they fill, with drop-aware eviction and with least recently used alone; a tiny model, since only tokens count

What is compared takes turns in every round, so that drift of the machine meets both; ratios are medians of those of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from megatron_dmtd.agents.policies import Message, RollingDrop
from megatron_dmtd.architecture import decoder_tensors, make_schedule
from megatron_dmtd.config.decoder import decoder_of
from megatron_dmtd.config.sections import ModelConfig
from megatron_dmtd.cycle import ORDINARY
from megatron_dmtd.errors import ConfigError, DMTDError
from megatron_dmtd.inference import EngineConfig, SamplingParams
from megatron_dmtd.infra.console import ending_quietly

# torch takes seconds, which help and refusals need not wait for
if TYPE_CHECKING:
    from megatron_dmtd.inference import Engine
    from megatron_dmtd.inference.weights import ModelWeights

#: 101 million parameters, 24 KiB of K and V for each token in fp32.
MODEL: dict[str, Any] = {
    "num_layers": 12,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16_000,
}
#: of the trajectories, whose numbers nobody looks at
TINY: dict[str, Any] = MODEL | {"num_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "head_dim": 16}
CASES = ("decode", "reposition", "recovery", "eviction")
STEPS = 4
#: turns of an agent; tokens of its question, of a call, of an answer; answers that stay
TURNS, QUESTION, CALL, ANSWER, KEEP = 40, 40, 8, 120, 4
#: tokens in positions beyond which the survivors move
REPOSITION = QUESTION + 2 * KEEP * (CALL + ANSWER)
SAMPLES = SamplingParams(ignore_eos=True)
clock: Callable[[], float] = time.perf_counter


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tokens", type=int, default=4096, help="of the texts; at least 256")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds; one more is not counted")
    parser.add_argument("--turns", type=int, default=TURNS, help="of each agent")
    parser.add_argument("--threads", type=int, help="default: torch's own number")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of one thread instead of wall time")
    parser.add_argument("--json", help="file to write all figures to")
    return parser.parse_args(argv)


def random_model(sizes: dict[str, Any], max_length: int) -> ModelWeights:
    """A decoder without cycles."""
    import torch

    from megatron_dmtd.inference.weights import build_model

    config = ModelConfig(tie_word_embeddings=False, max_position_embeddings=max_length, rope_theta=10_000.0, **sizes)
    schedule = make_schedule(decoder_of(config), ORDINARY)
    shapes, generator = decoder_tensors(schedule.decoder), torch.Generator().manual_seed(0)

    def read(name: str) -> torch.Tensor:
        size = shapes[name].shape
        return torch.ones(size) if len(size) == 1 else torch.empty(size).normal_(std=size[1] ** -0.5, generator=generator)

    return build_model(schedule, read)


def make_engine(model: ModelWeights, length: int, *, cache_tokens: int, **options: Any) -> Engine:
    """An engine for one request at a time."""
    from megatron_dmtd.inference import Engine

    return Engine(model, EngineConfig(max_batch=1, max_length=length, cache_tokens=cache_tokens, **options))


def random_text(num_tokens: int, seed: int = 1) -> list[int]:
    """Token ids."""
    import torch

    return torch.randint(0, 1000, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = clock()
    run()
    return clock() - start


def answers(num_tokens: int) -> list[tuple[int, int]]:
    """Every other stretch of 100 tokens, but for those at the beginning: what an agent would drop. Half of the text."""
    return [(begin, min(begin + 100, num_tokens)) for begin in range(30, num_tokens - 100, 200)]


# Cases.


def decode(model: ModelWeights, options: argparse.Namespace) -> list[dict[str, Any]]:
    """See the top of this file."""
    text, dropped = random_text(options.tokens), answers(options.tokens)
    active = options.tokens - sum(end - begin for begin, end in dropped)
    max_new = STEPS * (options.rounds + 2)
    length = options.tokens + max_new + 64
    programs = {"edited": (text, [{"after": options.tokens, "drop": dropped}]), "fresh": (text[:active], None)}
    engines = {}
    for name, (prompt, program) in programs.items():
        engine = make_engine(model, length, cache_tokens=length + 64, prefix_caching=False)
        engine.submit(prompt, max_new_tokens=max_new, params=SAMPLES, cache=program)
        while not engine.step():  # until the prompt is computed
            pass
        engines[name] = engine

    def steps(engine: Engine) -> Callable[[], None]:
        return lambda: [engine.step() for _ in range(STEPS)] and None

    rounds = [{name: timed(steps(engine)) for name, engine in engines.items()} for _ in range(options.rounds + 1)][1:]
    return [
        {
            "case": "decode",
            "what": f"tokens/s with {active} of {options.tokens} tokens active, and of {active} fresh ones",
            "value": STEPS / statistics.median(one["edited"] for one in rounds),
            "against": STEPS / statistics.median(one["fresh"] for one in rounds),
            "ratio": statistics.median(one["fresh"] / one["edited"] for one in rounds),
            "limit": ">= 0.95",
        }
    ]


@contextmanager
def copies_timed() -> Iterator[list[float]]:
    """Seconds of the rotated copies of every layer, while this is open."""
    from megatron_dmtd.inference.cache_ops.passes import PassViews

    found: list[float] = []
    whole = PassViews.copy_moved

    def measured(self: PassViews, *arguments: Any, **named: Any) -> None:
        found.append(timed(lambda: whole(self, *arguments, **named)))

    PassViews.copy_moved = measured  # type: ignore[method-assign]
    try:
        yield found
    finally:
        PassViews.copy_moved = whole  # type: ignore[method-assign]


def plain_copy(model: ModelWeights, num_tokens: int) -> Callable[[], None]:
    """A call that copies the K and V of some tokens, layer by layer, from contiguous memory to contiguous memory."""
    import torch

    attention = model.layers[0].spec.attention
    size = num_tokens, attention.key_size
    # As many tensors as there are: nothing is found in a cache.
    pairs = [(torch.randn(size), torch.zeros(size)) for _ in range(2 * len(model.layers))]

    def run() -> None:
        for source, target in pairs:
            target.copy_(source)

    return run


def reposition(model: ModelWeights, options: argparse.Namespace) -> list[dict[str, Any]]:
    """See the top of this file."""
    count = options.tokens
    text = random_text(count + options.rounds + 3)
    length = len(text) + 64
    engine = make_engine(model, length, cache_tokens=(options.rounds + 2) * (length + 64))
    copy = plain_copy(model, count)

    def ask(program: list[dict[str, Any]]) -> dict[str, int]:
        (done,) = engine.generate([text], max_new_tokens=1, params=SAMPLES, cache=[program])
        return done.usage

    computed = timed(lambda: ask([]))
    rounds = []
    for number in range(options.rounds + 1):
        # Another number of dropped tokens each time: survivors move to where no copy of them is.
        drop: dict[str, Any] = {"after": len(text) - 1, "drop": [(0, number + 1)]}
        one = {"plain": timed(lambda: copy()), "warm": timed(lambda: ask([drop]))}  # noqa: B023
        usage: list[Any] = []
        with copies_timed() as seconds:
            one["moved"] = timed(lambda: usage.append(ask([drop | {"reposition": True}])))  # noqa: B023
        one["copies"], one["repos"], one["prefill"] = sum(seconds), usage[0]["repos_tokens"], usage[0]["prefill_tokens"]
        one["request"] = one["moved"] - one["warm"]
        rounds.append(one)
    rounds = rounds[1:]
    if any(one["prefill"] != 1 or one["repos"] < count for one in rounds):
        raise ConfigError(found=f"usage {rounds}", required=f"{count} tokens moved and one computed", remedy="raise cache_tokens")
    found = []
    for name, limit in (("copies", "<= 3"), ("request", "<= 3")):
        found.append(
            {
                "case": "reposition",
                "what": f"ms for {count} tokens, {name}, and a plain copy",
                "value": 1e3 * statistics.median(one[name] for one in rounds),
                "against": 1e3 * statistics.median(one["plain"] for one in rounds),
                "ratio": statistics.median(one[name] / one["plain"] for one in rounds),
                "limit": limit,
            }
        )
    request = statistics.median(one["request"] for one in rounds)
    what = f"ms of computing {len(text)} tokens, and of a request that moves them"
    figures = {"value": 1e3 * computed, "against": 1e3 * request, "ratio": computed / request, "limit": ">= 30"}
    return [*found, {"case": "reposition", "what": what, **figures}]


def recovery(model: ModelWeights, options: argparse.Namespace) -> list[dict[str, Any]]:
    """See the top of this file."""
    text = random_text(options.tokens)
    # Each answer is dropped 300 tokens after it has ended, and every fourth time what is left moves together.
    program: list[dict[str, Any]] = []
    for number, (begin, end) in enumerate(answers(options.tokens - 300)):
        program.append({"after": end + 300, "drop": [(begin, end)]} | ({"reposition": True} if number % 4 == 3 else {}))
    length = options.tokens + 64
    engine = make_engine(model, length, cache_tokens=3 * length, prefix_caching=False)

    def ask(cache: Any) -> Callable[[], object]:
        return lambda: engine.generate([text], max_new_tokens=1, params=SAMPLES, cache=[cache])

    rounds = [(timed(ask(program)), timed(ask(None))) for _ in range(options.rounds + 1)][1:]
    return [
        {
            "case": "recovery",
            "what": f"ms of {options.tokens} tokens with {len(program)} operations, and without",
            "value": 1e3 * statistics.median(edited for edited, _ in rounds),
            "against": 1e3 * statistics.median(plain for _, plain in rounds),
            "ratio": statistics.median(edited / plain for edited, plain in rounds),
            "limit": "<= 1.15",
        }
    ]


def trajectory(num_turns: int, seed: int) -> Iterator[tuple[list[int], list[dict[str, Any]], int]]:
    """Requests of one agent: tokens, operations on them, and how many tokens are new."""
    messages: list[Message] = [{"role": "user", "content": "", "size": QUESTION}]
    text, known = random_text(QUESTION + num_turns * (CALL + ANSWER), seed), 0
    policy = RollingDrop(keep=KEEP, reposition_tokens=REPOSITION)
    for _ in range(num_turns):
        messages += [{"role": "assistant", "content": "", "size": CALL}, {"role": "tool", "content": "", "size": ANSWER}]
        fields = policy(messages, lambda message: message["size"]).cache or {}
        ends = list(accumulate(message["size"] for message in messages))
        begins = [0, *ends]
        program = []
        for trigger in sorted({*map(int, fields["drop"]), *fields["reposition"]}):
            numbers = fields["drop"].get(str(trigger), [])
            operation: dict[str, Any] = {"after": ends[trigger], "drop": [(begins[one], ends[one]) for one in numbers]}
            program.append(operation | ({"reposition": True} if trigger in fields["reposition"] else {}))
        yield text[: ends[-1]], program, ends[-1] - known
        known = ends[-1]


def eviction(options: argparse.Namespace) -> list[dict[str, Any]]:
    """See the top of this file."""
    requests = [one for pair in zip(*(trajectory(options.turns, seed) for seed in (1, 2))) for one in pair]
    longest = max(len(tokens) for tokens, _, _ in requests)
    length = REPOSITION + 2 * (CALL + ANSWER)  # positions
    model = random_model(TINY, length)
    new = sum(count for _, _, count in requests)

    def computed(cache_tokens: int, *, is_aware: bool) -> tuple[int, int]:
        """Tokens, and the most that are cached at one time."""
        engine = make_engine(model, length, cache_tokens=cache_tokens, drop_aware_eviction=is_aware)
        found, most = 0, 0
        for tokens, program, _ in requests:
            (done,) = engine.generate([tokens], max_new_tokens=1, params=SAMPLES, cache=[program])
            if done.refusal:
                raise ConfigError(found=done.refusal, required="requests that fit into the cache", remedy="change --turns")
            found += done.usage.prefill_tokens
            pages = [group.pages for group in engine.store.groups.values()]
            most = max(most, engine.store.page_size * max(one.num_pages - one.num_free for one in pages))
        return found, most

    whole, peak = computed(6 * longest + length, is_aware=True)
    aware, _ = computed(peak // 4, is_aware=True)
    plain, _ = computed(peak // 4, is_aware=False)
    common = {"case": "eviction"}
    return [
        common | {"what": "tokens computed, and new", "value": whole, "against": new, "ratio": whole / new, "limit": "<= 1.02"},
        common
        | {
            "what": f"tokens computed with {peak // 4} of {peak} cached, drop-aware, and least recently used",
            "value": aware,
            "against": plain,
            "ratio": aware / plain,
            "limit": "< 1",
        },
    ]


def show(row: dict[str, Any]) -> None:
    """One line per figure."""
    print(
        f"{row['case']:10} {row['value']:10.2f} {row['against']:10.2f} {row['ratio']:7.3f} {row['limit']:>8}  {row['what']}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 refused."""
    options = arguments(argv)
    import torch

    if options.cpu_time:
        global clock
        clock, options.threads = time.thread_time, 1
    if options.threads:
        torch.set_num_threads(options.threads)
    figures: list[dict[str, Any]] = []
    try:
        for name, least in (("tokens", 256), ("rounds", 1), ("turns", 1)):
            if getattr(options, name) < least:
                found = f"--{name} {getattr(options, name)}"
                raise ConfigError(found=found, required=f"at least {least}", remedy=f"raise --{name}")
        print(f"{torch.get_num_threads()} threads, {'CPU' if options.cpu_time else 'wall'} time", flush=True)
        print(f"{'case':10} {'value':>10} {'against':>10} {'ratio':>7} {'limit':>8}  what")
        timed_cases = {"decode": decode, "reposition": reposition, "recovery": recovery}
        model = random_model(MODEL, options.tokens + 4096) if {*options.cases} & timed_cases.keys() else None
        for case in options.cases:
            for row in eviction(options) if model is None or case == "eviction" else timed_cases[case](model, options):
                show(row)
                figures.append(row)
    except DMTDError as error:
        print(f"{type(error).__name__}\n{error}", file=sys.stderr)
        return 2
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
