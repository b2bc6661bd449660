"""In which order a decoder's layers are visited, by which streams, and which K and V outlive the pass.

A schedule is the method applied to a decoder. Training runs its visits one after the other; decoding runs those of one pass at a
time: the parallel pass once per cycle, the sequential pass once per token. The four variants and vanilla differ only in their
visits: code that runs a schedule need not ask which variant it is.

Source: docs/method.md, sections 1 to 9.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from megatron_dmtd.architecture.spec import DecoderSpec, LayerSpec
from megatron_dmtd.cycle.method import Method


class Stream(Enum):
    """What the slots of a stream hold."""

    REAL = "real"
    """The tokens of the text."""
    SHADOW = "shadow"
    """The token at cycle heads, MASK elsewhere."""


PARALLEL, SEQUENTIAL = "parallel", "sequential"


@dataclass(frozen=True, kw_only=True, slots=True)
class KVGroup:
    """K and V of several visits that are stored alike: entries of one size, and always equally many."""

    name: str
    pass_name: str
    """`parallel` or `sequential`: the pass that writes it. It determines how many entries a request has (`num_entries`)."""
    visits: tuple[int, ...]
    """Indices of the schedule's visits that store here, in order."""
    num_places: int
    """Places, one for the K and V of each visit, or of several visits that overwrite each other's."""
    num_key_value_heads: int
    head_dim: int
    window: int | None
    """Most keys that its visits see; None: all."""

    def num_entries(self, method: Method, num_tokens: int) -> int:
        """Entries of a request that has taken `num_tokens` tokens."""
        return num_tokens if self.pass_name == SEQUENTIAL else method.parallel_entries(num_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """One application of a layer."""

    layer: int
    """Index of the decoder's layer whose weights are used. Several visits may name the same layer."""
    pass_name: str
    """`parallel` (once per cycle in decoding) or `sequential` (once per token)."""
    streams: tuple[Stream, ...]
    """Streams that enter, in the order in which they are concatenated."""
    outputs: tuple[Stream, ...]
    """Streams that leave. The others end at this visit's K and V: nothing later reads them."""
    stored: Stream
    """The stream whose K and V outlive the pass."""
    kv_group: str
    """Name of the group in which they are kept."""
    kv_place: int
    """Place of its K and V in the group. A visit of a later loop to the same layer may have the same one, and overwrites it."""
    loop: int = 0
    """Which run of the looped layers this is, from 1. 0: the layer is not one of them."""
    enters_loop: bool = False
    """Whether this is the first layer of a run, before which the hidden states that reached the loop are injected."""
    leaves_loop: bool = False
    """Whether this is the last layer of a run, after which `LoopSpec.norm` applies."""

    def __post_init__(self) -> None:
        assert self.outputs and set(self.outputs) <= set(self.streams) and self.stored in self.streams, self


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A decoder and all visits to its layers, in order."""

    decoder: DecoderSpec
    method: Method
    visits: tuple[Visit, ...]
    kv_groups: tuple[KVGroup, ...]

    def __post_init__(self) -> None:
        names = [visit.pass_name for visit in self.visits]
        assert names == sorted(names) and names[-1] == SEQUENTIAL, names  # "parallel" sorts before "sequential"
        assert {visit.layer for visit in self.visits} == set(range(self.decoder.num_layers)), "a layer that nobody visits"
        for group in self.kv_groups:
            stored = [self.visits[index] for index in group.visits]
            assert {visit.kv_group for visit in stored} == {group.name}, group
            assert {visit.kv_place for visit in stored} == set(range(group.num_places)), group
        assert sum(len(group.visits) for group in self.kv_groups) == len(self.visits), self.kv_groups

    @property
    def num_visits(self) -> int:
        """Visits of one forward pass."""
        return len(self.visits)

    @property
    def split(self) -> int:
        """The first visit of the sequential pass, where `Embed(x)` is added to the parallel outputs. 0: no parallel pass."""
        return sum(visit.pass_name == PARALLEL for visit in self.visits)

    def layer(self, visit: Visit) -> LayerSpec:
        """The layer that a visit names."""
        return self.decoder.layers[visit.layer]

    def pass_visits(self, pass_name: str) -> tuple[Visit, ...]:
        """The visits of one pass, in order; none of `parallel` in a vanilla model."""
        return tuple(visit for visit in self.visits if visit.pass_name == pass_name)

    def group(self, name: str) -> KVGroup:
        """A K/V group by its name."""
        return next(group for group in self.kv_groups if group.name == name)

    def pass_groups(self, pass_name: str) -> tuple[KVGroup, ...]:
        """The K/V groups that a pass writes."""
        return tuple(group for group in self.kv_groups if group.pass_name == pass_name)

    def streams_into(self, index: int) -> tuple[Stream, ...]:
        """The streams that enter visit `index`; what leaves the last visit is one real stream."""
        return self.visits[index].streams if index < len(self.visits) else (Stream.REAL,)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Flow:
    """A visit before its K and V have a place."""

    layer: int
    loop: int
    pass_name: str
    streams: tuple[Stream, ...]
    outputs: tuple[Stream, ...]
    stored: Stream


def _order(decoder: DecoderSpec, num_loops: int) -> list[tuple[int, int]]:
    """(layer, loop) of each visit."""
    loop = decoder.loop
    if loop is None:
        return [(layer, 0) for layer in range(decoder.num_layers)]
    looped = range(loop.first_layer, loop.last_layer + 1)
    before = [(layer, 0) for layer in range(loop.first_layer)]
    after = [(layer, 0) for layer in range(loop.last_layer + 1, decoder.num_layers)]
    return before + [(layer, run) for run in range(1, num_loops + 1) for layer in looped] + after


def _flows(order: list[tuple[int, int]], method: Method) -> Iterator[_Flow]:
    streams, real = tuple(Stream(name) for name in method.streams), Stream.REAL
    split = sum(layer < method.num_parallel_layers for layer, _ in order)
    for index, (layer, loop) in enumerate(order):
        if index < split:
            # Of a real stream in the last parallel visit only K and V are ever read (docs/method.md, section 3.1).
            outputs = streams[-1:] if index == split - 1 else streams
            yield _Flow(layer=layer, loop=loop, pass_name=PARALLEL, streams=streams, outputs=outputs, stored=streams[0])
        else:
            yield _Flow(layer=layer, loop=loop, pass_name=SEQUENTIAL, streams=(real,), outputs=(real,), stored=real)


def _group_name(pass_name: str, layer: LayerSpec, others: list[LayerSpec]) -> str:
    """The name of a pass's K/V group: that of the pass if all its layers store alike, otherwise with what distinguishes them."""
    if len({_stored_as(other) for other in others}) == 1:
        return pass_name
    heads, width, window = _stored_as(layer)
    return f"{pass_name}/{'full' if window is None else f'window-{window}'}/{heads}x{width}"


def _stored_as(layer: LayerSpec) -> tuple[int, int, int | None]:
    attention = layer.attention
    return attention.num_key_value_heads, attention.head_dim, attention.window


def make_schedule(
    decoder: DecoderSpec,
    method: Method,
    *,
    num_loops: int | None = None,
    kv_cache_mode: Literal["per_loop", "last_loop"] | None = None,
) -> Schedule:
    """The visits of `method` to `decoder`. The configuration is validated, so there is at least one sequential layer.

    `num_loops` and `kv_cache_mode` replace those of the decoder's loop; without a loop they say nothing.
    """
    assert method.num_parallel_layers < decoder.num_layers, (method, decoder.num_layers)
    loop = decoder.loop
    assert loop is None or not loop.first_layer < method.num_parallel_layers <= loop.last_layer, "a loop in both passes"
    runs = num_loops if num_loops is not None else loop.num_loops if loop is not None else 1
    assert runs >= 1, runs
    mode = kv_cache_mode or (loop.kv_cache_mode if loop is not None else "per_loop")
    flows = list(_flows(_order(decoder, runs), method))
    of_pass = {name: [decoder.layers[flow.layer] for flow in flows if flow.pass_name == name] for name in (PARALLEL, SEQUENTIAL)}
    places: dict[str, dict[tuple[int, int], int]] = {}
    indices: dict[str, list[int]] = {}
    visits = []
    for index, flow in enumerate(flows):
        name = _group_name(flow.pass_name, decoder.layers[flow.layer], of_pass[flow.pass_name])
        group = places.setdefault(name, {})
        kept_as = flow.layer, flow.loop if mode == "per_loop" else 0
        visits.append(
            Visit(
                layer=flow.layer,
                pass_name=flow.pass_name,
                streams=flow.streams,
                outputs=flow.outputs,
                stored=flow.stored,
                kv_group=name,
                kv_place=group.setdefault(kept_as, len(group)),
                loop=flow.loop,
                enters_loop=loop is not None and flow.layer == loop.first_layer,
                leaves_loop=loop is not None and flow.layer == loop.last_layer,
            )
        )
        indices.setdefault(name, []).append(index)
    groups = tuple(_kv_group(name, indices[name], visits, decoder) for name in indices)
    return Schedule(decoder=decoder, method=method, visits=tuple(visits), kv_groups=groups)


def _kv_group(name: str, indices: list[int], visits: list[Visit], decoder: DecoderSpec) -> KVGroup:
    first = visits[indices[0]]
    heads, width, window = _stored_as(decoder.layers[first.layer])
    return KVGroup(
        name=name,
        pass_name=first.pass_name,
        visits=tuple(indices),
        num_places=len({visits[index].kv_place for index in indices}),
        num_key_value_heads=heads,
        head_dim=width,
        window=window,
    )
