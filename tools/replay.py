#!/usr/bin/env python3
"""Replay recorded runs of agents under cache policies, and compare what they cost.

    python tools/replay.py example --output runs.jsonl --model model      (no traces yet? an agent reads Python's sources)
    python tools/serve.py model --port 8000 &
    python tools/replay.py run runs.jsonl --base-url http://localhost:8000/v1 --output replay
    python tools/replay.py run runs.jsonl --model model --cache-tokens 16384 --output replay-in-process
    python tools/replay.py report replay
    python tools/replay.py pictures docs/images                           (those of docs/cache_operations.md)

A file of trajectories has one per line: a list of OpenAI's messages, tool calls included, or an object with `messages`, `tools`
and `id`. Every request that the agent made is made again, with the recorded history, under each policy:

    standard           the text as it is, in ordinary requests
    text_engineering   past --summary-tokens, what lies between the task and the last exchange becomes a summary
    rolling_drop       the text as it is; all but the last --keep tool responses are dropped from the cache, and past
                       --reposition-tokens the survivors move to positions from 0

Of each answer only the first token is asked for: the history goes on as recorded. The output folder gets turns.jsonl (a line
per request), summary.jsonl and report.md (a line per policy) and replay.png. An interrupted replay goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dmtd.agents.cost import Prices
from megatron_dmtd.agents.example import example_trajectory
from megatron_dmtd.agents.policies import (
    KEEP_TOOL_RESPONSES,
    REPOSITION_TOKENS,
    SUMMARY_TOKENS,
    Count,
    Policy,
    RollingDrop,
    TextEngineering,
    estimated,
    standard,
)
from megatron_dmtd.agents.replay import TURNS_FILE, Replay, read_turns, run_replay
from megatron_dmtd.agents.report import write_report
from megatron_dmtd.agents.trajectories import read_trajectories, write_trajectories
from megatron_dmtd.cycle import VARIANTS
from megatron_dmtd.errors import ConfigError, DMTDError, Refusal
from megatron_dmtd.inference.config import EngineConfig, require_directory
from megatron_dmtd.infra.console import ending_quietly
from megatron_dmtd.infra.digests import sha256_of_file
from megatron_dmtd.infra.disk import disk_errors

# torch and transformers take seconds, which help and refusals need not wait for
if TYPE_CHECKING:
    from megatron_dmtd.agents.clients import Client

POLICIES = ("standard", "text_engineering", "rolling_drop")
_UNWRITABLE = Refusal(ConfigError, required="a place that can be written", remedy="choose another --output, or make room")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="run|example|report|pictures")
    _add_run(commands)
    example = commands.add_parser("example", help="write an example trajectory, and a model to try it with", allow_abbrev=False)
    example.add_argument("--output", type=Path, required=True, metavar="FILE", help="file of JSON lines to write")
    example.add_argument("--responses", type=int, default=60, help="tool responses of a trajectory (default: %(default)s)")
    example.add_argument("--lines", type=int, default=40, help="lines that are read at once (default: %(default)s)")
    example.add_argument("--seed", type=int, default=0, help="another seed follows other names (default: %(default)s)")
    example.add_argument("--trajectories", type=int, default=1, help="how many, with seeds from --seed on (default: %(default)s)")
    example.add_argument("--sources", type=Path, metavar="DIR", help="Python files to read (default: the standard library)")
    example.add_argument("--model", type=Path, metavar="DIR", help="also write a small model of random weights to this folder")
    example.add_argument("--hidden-size", type=int, default=128, help="of that model (default: %(default)s)")
    example.add_argument("--layers", type=int, default=4, help="of that model (default: %(default)s)")
    example.add_argument("--variant", choices=sorted(VARIANTS), help="of that model (default: an ordinary decoder)")
    report = commands.add_parser("report", help="write table and plots of a replay again", allow_abbrev=False)
    report.add_argument("output", type=Path, help="folder of the replay")
    pictures = commands.add_parser("pictures", help="draw the pictures of docs/cache_operations.md", allow_abbrev=False)
    pictures.add_argument("output", type=Path, help="folder for them")
    return parser.parse_args(argv)


def _add_run(commands: Any) -> None:
    run = commands.add_parser("run", help="replay trajectories", allow_abbrev=False)
    run.add_argument("trajectories", type=Path, help="file of JSON lines")
    run.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the figures")
    run.add_argument("--base-url", metavar="URL", help="a running server, such as http://localhost:8000/v1")
    run.add_argument("--model-name", help="name of the model in requests (default: none is named)")
    run.add_argument("--api-key-file", type=Path, help="file with the server's key")
    run.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="for an answer (default: %(default)s)")
    run.add_argument("--model", type=Path, metavar="DIR", help="a model directory: decode in this process, without a server")
    run.add_argument("--cache-tokens", type=int, help="with --model: tokens that its K/V store holds (default: the engine's)")
    run.add_argument("--chunk-tokens", type=int, default=512, help="with --model: prompt tokens per step (default: %(default)s)")
    run.add_argument(
        "--evict-by-use", action="store_true", help="with --model: evict what was dropped last, not first, for comparison"
    )
    run.add_argument(
        "--send-tools", action="store_true", help="send the definitions of tools too, to a server that takes them; ours does not"
    )
    run.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="default: all")
    run.add_argument("--keep", type=int, default=KEEP_TOOL_RESPONSES, help="tool responses that stay (default: %(default)s)")
    run.add_argument(
        "--reposition-tokens", type=int, default=REPOSITION_TOKENS, help="threshold of rolling_drop (default: %(default)s)"
    )
    run.add_argument(
        "--summary-tokens", type=int, default=SUMMARY_TOKENS, help="threshold of text_engineering (default: %(default)s)"
    )
    run.add_argument("--standard-tokens", type=int, help="past it standard summarises too: a model's limit (default: never)")
    run.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="counts tokens for the thresholds (default: --model, or an estimate)"
    )
    run.add_argument("--bytes-per-token", type=float, default=4.0, help="of the estimate (default: %(default)s)")
    run.add_argument("--interleave", type=int, default=1, help="agents that take turns with one cache (default: %(default)s)")
    for field in fields(Prices):
        default = getattr(Prices(), field.name)
        text = f"list price per million tokens, {field.name} (default: %(default)s)"
        run.add_argument(f"--price-{field.name}", type=float, default=default, help=text)


def policies(options: argparse.Namespace) -> list[Policy]:
    """Those that were chosen. Raises `ConfigError`."""
    known: tuple[Policy, ...] = (
        standard(options.standard_tokens),
        TextEngineering(threshold=options.summary_tokens),
        RollingDrop(keep=options.keep, reposition_tokens=options.reposition_tokens),
    )
    return [policy for policy in known if policy.name in options.policies]


def counting(options: argparse.Namespace) -> Count:
    """How messages are counted."""
    folder = options.tokenizer or options.model
    if folder is None:
        if not options.bytes_per_token > 0:
            found = f"--bytes-per-token {options.bytes_per_token}"
            raise ConfigError(found=found, required="a number above 0", remedy="change it")
        return estimated(options.bytes_per_token)
    require_directory(folder)
    from megatron_dmtd.agents.clients import counted_by
    from megatron_dmtd.inference.text import load_tokenizer

    return counted_by(load_tokenizer(folder))


def client(options: argparse.Namespace) -> Client:
    """Who answers. Raises `ConfigError`."""
    from megatron_dmtd.agents.clients import EngineClient, HTTPClient

    if options.base_url is not None:
        key = options.api_key_file
        return HTTPClient(
            base_url=options.base_url,
            model=options.model_name,
            api_key=None if key is None else _key(key),
            timeout_s=options.timeout,
        )
    from megatron_dmtd.inference import Engine

    return EngineClient(Engine(options.model, engine_config(options)))


def _key(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(found=f"--api-key-file {path}: {error}", required="a readable file", remedy="correct it") from error


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """Of an engine in this process."""
    config = EngineConfig(
        max_batch=1,
        cache_tokens=options.cache_tokens,
        chunk_tokens=options.chunk_tokens,
        drop_aware_eviction=not options.evict_by_use,
    )
    config.check()
    return config


def check(options: argparse.Namespace) -> None:
    """Accept a choice of who answers, or raise `ConfigError`."""
    if (options.base_url is None) == (options.model is None):
        found = "both --base-url and --model" if options.model else "neither --base-url nor --model"
        raise ConfigError(found=found, required="one of them: a running server, or a model for this process", remedy="give one")
    if options.model is None and (options.cache_tokens is not None or options.evict_by_use):
        found = "--cache-tokens or --evict-by-use with --base-url"
        raise ConfigError(found=found, required="--model", remedy="set the cache of a server where it is started")
    if options.base_url is not None and not options.base_url.startswith(("http://", "https://")):
        found = f"--base-url {options.base_url}"
        raise ConfigError(found=found, required="an address that begins with http:// or https://", remedy="correct it")


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What decides the figures."""
    own = {name: value for name, value in vars(options).items() if name not in ("command", "output", "timeout", "api_key_file")}
    own["trajectories"] = sha256_of_file(options.trajectories)
    return {name: str(value) if isinstance(value, Path) else value for name, value in own.items()}


def run(options: argparse.Namespace) -> int:
    """Replay."""
    from tqdm import tqdm

    check(options)
    prices = Prices(**{field.name: getattr(options, f"price_{field.name}") for field in fields(Prices)})
    chosen, trajectories = policies(options), read_trajectories(options.trajectories)
    if options.model is not None:
        engine_config(options)
        require_directory(options.model)
    replay = Replay(
        trajectories=trajectories,
        policies=chosen,
        count=counting(options),
        prices=prices,
        interleave=options.interleave,
        sends_tools=options.send_tools,
    )
    if not options.send_tools and any(trajectory.chat.tools for trajectory in trajectories):
        print("definitions of tools are not sent (--send-tools)", file=sys.stderr)
    with (
        disk_errors(_UNWRITABLE, found=str(options.output)),
        tqdm(total=replay.num_turns, unit="turn", disable=None, dynamic_ncols=True) as bar,
    ):
        # An engine that evicts would meet what other runs have left in its cache, so each group has its own.
        fresh = None if options.model is None else (lambda: client(options))
        one = client(options) if fresh is None else None
        turns = run_replay(replay, one, options.output, settings=settings_of(options), on_turn=bar.update, fresh=fresh)
        text = write_report(turns, options.output)
    print(text, end="")
    print(f"turns, plots and this table: {options.output}", file=sys.stderr)
    return 0


def example(options: argparse.Namespace) -> int:
    """Write example trajectories, and a model."""
    if options.trajectories < 1:
        raise ConfigError(found=f"--trajectories {options.trajectories}", required="at least 1", remedy="change it")
    if options.hidden_size < 32 or options.hidden_size % 32 or options.layers < 2 or options.layers % 2:
        found = f"--hidden-size {options.hidden_size} --layers {options.layers}"
        raise ConfigError(found=found, required="a multiple of 32, and an even number of layers", remedy="change them")
    records = [
        example_trajectory(responses=options.responses, lines=options.lines, seed=options.seed + number, folder=options.sources)
        for number in range(options.trajectories)
    ]
    with disk_errors(_UNWRITABLE, found="the example"):
        write_trajectories(options.output, records)
        if options.model is not None:
            from megatron_dmtd.agents.example_model import write_example_model

            shape = {"hidden_size": options.hidden_size, "num_layers": options.layers}
            write_example_model(options.model, records[0], variant=options.variant, **shape)
    print(f"{len(records)} trajectories of {options.responses} tool responses: {options.output}")
    return 0


def report(options: argparse.Namespace) -> int:
    """Write a report again."""
    path = options.output / TURNS_FILE
    turns = read_turns(path) if path.is_file() else []
    if not turns:
        found = f"no turns in {path}"
        raise ConfigError(found=found, required="the output folder of a replay", remedy="run one, or correct the path")
    with disk_errors(_UNWRITABLE, found=str(options.output)):
        print(write_report(turns, options.output), end="")
    return 0


def pictures(options: argparse.Namespace) -> int:
    """Draw the pictures of the documentation."""
    from megatron_dmtd.agents.pictures import write_pictures

    with disk_errors(_UNWRITABLE, found=str(options.output)):
        for path in write_pictures(options.output):
            print(path)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 refused (the message says what to change), 130 interrupted."""
    options = arguments(argv)
    commands = {"run": run, "example": example, "report": report, "pictures": pictures}
    try:
        return commands[options.command](options)
    except DMTDError as error:
        print(f"{type(error).__name__}\n{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(ending_quietly(main))
