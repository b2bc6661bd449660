"""How often the looped layers of a decoder run: the settings of an engine, what a request may ask for, and the pieces in which a
text is computed where the numbers depend on them. Numbers only.

With `per_loop`, every loop keeps K and V of its own: a request runs as many loops as it likes, up to those that the cache has
places for, and always as many. With `last_loop` all loops share a place. While a piece of a text is computed, loop k reads its
own K and V of the piece and those of the last loop of everything before it; so the piece's beginning decides about the numbers,
and pieces must not depend on what else is decoded. In return the number of loops may change from token to token.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from megatron_dmtd.architecture import DecoderSpec, LoopSpec, Schedule, make_schedule
from megatron_dmtd.cycle import Method
from megatron_dmtd.errors import ConfigError
from megatron_dmtd.inference.sampling_params import ParameterError

KVMode = Literal["per_loop", "last_loop"]


def check_arguments(num_loops: object, kv_mode: object, prefill_chunk: object) -> None:
    """Accept the arguments of an engine, whatever its model, or raise `ConfigError`."""
    for name, value in (("num_loops", num_loops), ("prefill_chunk", prefill_chunk)):
        if value is not None and not _is_count(value):
            raise ConfigError(found=f"{name}={value!r}", required="an integer of at least 1, or None", remedy=f"change {name}")
    if kv_mode is not None and kv_mode not in get_args(KVMode):
        raise ConfigError(found=f"kv_mode={kv_mode!r}", required="per_loop, last_loop, or None", remedy="change kv_mode")


def scheduled_with(schedule: Schedule, num_loops: int | None, kv_mode: KVMode | None) -> Schedule:
    """The schedule with other loops; None for what the decoder says.

    Raises:
        ConfigError: There is no such number of loops or mode, or the decoder has no loop.
    """
    check_arguments(num_loops, kv_mode, None)
    loop = schedule.decoder.loop
    if loop is None:
        if num_loops not in (None, 1) or kv_mode is not None:
            raise ConfigError(
                found=f"num_loops={num_loops!r}, kv_mode={kv_mode!r} for a decoder whose layers run once",
                required="a decoder with looped layers",
                remedy="leave both out",
            )
        return schedule
    chosen = replace(loop, num_loops=num_loops or loop.num_loops, kv_cache_mode=kv_mode or loop.kv_cache_mode)
    return make_schedule(replace(schedule.decoder, loop=chosen), schedule.method)


def checked_chunk(prefill_chunk: int | None, default: int, decoder: DecoderSpec, method: Method) -> int:
    """Most tokens of a prompt that are computed at once. Raises `ConfigError` if that is impossible for the model.

    `default`: if nothing is asked for; rounded to whole cycles where pieces have exactly this length.
    """
    if prefill_chunk is None:
        return default if shared(decoder) is None else max(method.cycle_start(default), method.cycle_length)
    if shared(decoder) is not None and method.cycle_start(prefill_chunk) != prefill_chunk:
        raise ConfigError(
            found=f"prefill_chunk={prefill_chunk} with last_loop and cycles of {method.cycle_length} tokens",
            required="pieces of whole cycles",
            remedy="choose a multiple of the cycle length, or kv_mode='per_loop'",
        )
    return prefill_chunk


def shared(decoder: DecoderSpec) -> LoopSpec | None:
    """The decoder's loop, if all its runs share the places of their K and V."""
    loop = decoder.loop
    return loop if loop is not None and loop.kv_cache_mode == "last_loop" else None


def most_request_loops(decoder: DecoderSpec) -> int | None:
    """Most loops that a request may ask for; None: any number."""
    if decoder.loop is None:
        return 1
    return None if shared(decoder) is not None else decoder.loop.num_loops


def request_loops(decoder: DecoderSpec, asked: object) -> tuple[int, ...]:
    """How often looped layers run: for a prompt, then for each token of the output, the last number for all that remain.

    Raises:
        ConfigError: It cannot be had.
    """
    loop = decoder.loop
    if asked is None:
        return (1,) if loop is None else (loop.num_loops,)
    many = tuple(asked) if isinstance(asked, Sequence) and not isinstance(asked, str | bytes) else (asked,)
    if loop is None:
        if many != (1,):
            raise ParameterError("num_loops", asked, "None: the layers of this decoder run once")
        return (1,)
    if not many or not all(map(_is_count, many)):
        raise ParameterError("num_loops", asked, "an integer of at least 1, or, with last_loop, several")
    if loop.kv_cache_mode == "per_loop":
        if len(many) > 1:
            raise ParameterError("num_loops", asked, "one number, since each loop keeps keys and values of its own")
        if many[0] > loop.num_loops:
            raise ParameterError("num_loops", asked, f"at most {loop.num_loops}, the loops that the cache has places for")
    return tuple(map(int, many))


def _is_count(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """How the known tokens of a request are cut into pieces, and how many loops each runs."""

    prompt_length: int
    loops: tuple[int, ...] = (1,)
    """See `request_loops`."""
    length: int | None = None
    """Tokens of each piece of the prompt but the last, counted from its beginning; the tokens after the prompt are pieces of one
    token. None: any cut gives the same numbers."""

    def num_loops(self, start: int) -> int:
        """Loops of a piece that begins there."""
        return self.loops[min(max(0, start - self.prompt_length + 1), len(self.loops) - 1)]

    def stop(self, start: int, num_tokens: int) -> int:
        """Where the piece that begins at `start` ends, of `num_tokens` known tokens."""
        assert self.length is not None, "pieces of any length"
        if start >= self.prompt_length:
            return start + 1
        return min((start // self.length + 1) * self.length, self.prompt_length, num_tokens)

    @property
    def prefix_key(self) -> int:
        """What must be equal for two requests to share the K and V of equal tokens: the loops of their prompts."""
        return self.loops[0]

    def num_shareable(self, num_taken: int) -> int:
        """Leading tokens, of those taken, whose K and V do not depend on how the request has been cut."""
        return num_taken if self.length is None else min(num_taken, self.prompt_length)
