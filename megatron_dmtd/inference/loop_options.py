"""The options of commands that say how often looped layers run and what they cache; `--hf-overrides` is as in vLLM. No torch."""

from __future__ import annotations

import argparse
import difflib
import json
from typing import Any

from megatron_dmtd.errors import ConfigError, shown
from megatron_dmtd.inference.loops import check_arguments

#: The fields of a `config.json` that a command may replace, and the arguments of `Engine` that do it.
FREE_FIELDS = {"n_recurrent_loops": "num_loops", "recurrent_kv_cache_mode": "kv_mode"}


def add_loop_options(parser: argparse.ArgumentParser) -> None:
    """Add them to a command."""
    parser.add_argument("--num-loops", type=int, metavar="N", help="how often looped layers run (default: as the model says)")
    parser.add_argument(
        "--kv-mode", choices=("per_loop", "last_loop"), help="what is cached of looped layers (default: as the model says)"
    )
    parser.add_argument(
        "--prefill-chunk",
        type=int,
        metavar="TOKENS",
        help="most tokens of a prompt computed at once; with last_loop exactly so many (default: 512)",
    )
    parser.add_argument(
        "--hf-overrides",
        metavar="JSON",
        help='fields of the model\'s config.json to replace: {"n_recurrent_loops": 2, "recurrent_kv_cache_mode": "last_loop"}',
    )


def loop_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments `num_loops`, `kv_mode` and `prefill_chunk` of `Engine`.

    Raises:
        ConfigError: One is impossible, the overrides are no JSON object or name a field that is not free, or one is given twice.
    """
    found = {"num_loops": options.num_loops, "kv_mode": options.kv_mode, "prefill_chunk": options.prefill_chunk}
    for field, value in overrides_of(options.hf_overrides).items():
        name = FREE_FIELDS[field]
        if found[name] is not None:
            raise ConfigError(
                found=f"--hf-overrides with {field}, and --{name.replace('_', '-')}",
                required="one of the two",
                remedy="leave one out",
            )
        found[name] = value
    check_arguments(found["num_loops"], found["kv_mode"], found["prefill_chunk"])
    return found


def overrides_of(text: str | None) -> dict[str, Any]:
    """The fields to replace, with values that are not null. Raises `ConfigError`."""
    if text is None:
        return {}
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise _refusal(f"--hf-overrides {shown(text)}: {error}") from error
    if not isinstance(fields, dict):
        raise _refusal(f"--hf-overrides {shown(text)}")
    for name in fields:
        if name not in FREE_FIELDS:
            close = difflib.get_close_matches(name, FREE_FIELDS, n=1)
            raise ConfigError(
                found=f"--hf-overrides with {shown(name)}" + (f" (did you mean {close[0]}?)" if close else ""),
                required=f"only {' and '.join(FREE_FIELDS)}: the weights depend on the others",
                remedy="leave it out",
            )
    return {name: value for name, value in fields.items() if value is not None}


def _refusal(found: str) -> ConfigError:
    return ConfigError(found=found, required="a JSON object", remedy="""write for example '{"n_recurrent_loops": 2}'""")
