"""A pass over a K/V store of random contents, in torch, in C and in a static shape, and what each row of it should read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_dmtd.architecture import make_schedule
from megatron_dmtd.architecture.schedule import PARALLEL, SEQUENTIAL
from megatron_dmtd.cycle import visible
from megatron_dmtd.inference.forward import Forward
from megatron_dmtd.inference.kv.codec import PlainCodec
from megatron_dmtd.inference.kv.device_tables import DeviceTables
from megatron_dmtd.inference.kv.pages import PageTables
from megatron_dmtd.inference.kv.store import KVStore
from megatron_dmtd.inference.ops.protocol import LayerVisit
from megatron_dmtd.inference.passes import GroupColumns, Pass
from megatron_dmtd.inference.planner import Chunk, Rows, StepPlan, plan_step
from megatron_dmtd.inference.static_pass import StaticPass, StaticShape, num_pages_read
from tests.inference.oracle_models import decoder_of, method_of, model_of
from tests.oracles.parallel_dmtd import Shape, random_weights

PAGE_SIZE = 16
#: Heads that native kernels take; windows longer and shorter than a page and than a cycle.
SHAPE = Shape(head_dim=16, num_attention_heads=6, hidden_size=40, windows=(18, 3, None, 5), qkv_bias=True)


@dataclass
class Setting:
    """Two requests with tokens in the store, and a step that takes one more of each."""

    history: str
    block_attention: str
    starts: tuple[int, int] = (36, 20)
    dtype: torch.dtype = torch.float32
    shift: int = 0
    """Added to the positions of all rows; entries stay where they are."""

    def __post_init__(self) -> None:
        kind = self.history, self.block_attention
        self.model = model_of(SHAPE, random_weights(SHAPE, seed=2), *kind, dtype=self.dtype)
        self.schedule = make_schedule(decoder_of(SHAPE), method_of(SHAPE, *kind))
        self.store = KVStore(self.schedule, PlainCodec(self.dtype), num_pages=12, page_size=PAGE_SIZE, num_scratch_pages=3)
        generator = torch.Generator().manual_seed(5)
        for place in (place for group in self.store.groups.values() for place in group.places):
            place.k_PGDT.normal_(generator=generator)
            place.v_PGTD.normal_(generator=generator)
        self.forward = Forward(self.model, self.store, num_slots=2, num_positions=64, native=self.dtype == torch.float32)
        self.tables = DeviceTables(self.store, num_slots=2, max_entries=64, device=torch.device("cpu"))
        self.requests = [PageTables(), PageTables()]
        for start in (self.starts[0] // 2, self.starts[0]):  # so that pages of the two interleave
            for slot in (1, 0):
                self.store.grow(self.requests[slot], min(start, self.starts[slot]) + 1)
        for slot in range(2):
            self.tables.update(slot, self.requests[slot])
        for table in self.tables.by_group.values():
            table.page_SP[2] = self.store.num_pages + 2
        chunks = [
            Chunk(slot=slot, tokens=[3] * (start + 1), start=start, stop=start + 1) for slot, start in enumerate(self.starts)
        ]
        self.plan: StepPlan = plan_step(self.schedule.method, chunks)
        for rows in (self.plan.parallel, self.plan.sequential):
            rows.position = [position + self.shift for position in rows.position]

    def rows(self, pass_name: str) -> tuple[Rows, list[int]]:
        """The rows of a pass, and those that leave it."""
        if pass_name == PARALLEL:
            return self.plan.parallel, self.plan.outputs
        return self.plan.sequential, self.plan.last_rows

    def dynamic(self, pass_name: str) -> Pass:
        """The pass as it comes."""
        rows, final = self.rows(pass_name)
        groups = GroupColumns(self.schedule.pass_groups(pass_name), self.tables.by_group)
        return Pass(rows=rows, slots=rows.chunk, final=final, groups=groups, page_size=PAGE_SIZE)

    def static(self, pass_name: str, *, num_chunks: int = 2) -> StaticPass:
        """The same in a shape of `num_chunks` chunks, some of which may be nobody's."""
        rows, _ = self.rows(pass_name)
        groups, visits = self.schedule.pass_groups(pass_name), self.schedule.pass_visits(pass_name)
        per_stream = SHAPE.cycle_length if pass_name == PARALLEL else 1
        shape = StaticShape(
            num_chunks=num_chunks,
            rows_per_chunk=per_stream * len(visits[0].streams),
            final_per_chunk=per_stream * len(visits[-1].outputs),
            num_pages=tuple(num_pages_read(rows, group.window, PAGE_SIZE) for group in groups),
            has_local=self.history == "real" and pass_name == PARALLEL,
        )
        run = StaticPass(shape, groups, self.tables.by_group, first_scratch_page=self.store.num_pages, page_size=PAGE_SIZE)
        run.fill(rows, rows.chunk)
        return run

    def visits(self) -> list[tuple[str, LayerVisit]]:
        """Every visit with its pass."""
        return [(name, visit) for name in (PARALLEL, SEQUENTIAL) for visit in self.forward.visits[name]]

    @cached_property
    def qkv(self) -> dict[str, torch.Tensor]:
        """Random projections of the rows of each pass."""
        generator = torch.Generator().manual_seed(6)
        width = (SHAPE.num_attention_heads + 2 * SHAPE.num_key_value_heads) * SHAPE.head_dim
        return {
            name: torch.randn(len(self.rows(name)[0]), width, generator=generator).to(self.dtype)
            for name in (PARALLEL, SEQUENTIAL)
        }

    def entry(self, visit: LayerVisit, slot: int, entry: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[G, D]` of one entry of a request."""
        page = self.requests[slot][visit.group].pages[entry // PAGE_SIZE]
        k_BGKD, v_BGKD = visit.pages.read(torch.tensor([[page]]))
        return k_BGKD[0, :, entry % PAGE_SIZE], v_BGKD[0, :, entry % PAGE_SIZE]


def rotated(head_D: torch.Tensor, position: int) -> torch.Tensor:
    """Rotary embedding of one head by the definition."""
    half = len(head_D) // 2
    angle = position * SHAPE.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    first, second = head_D[:half].double(), head_D[half:].double()
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()])


def normed(head_D: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    """RMSNorm by the definition."""
    wide = head_D.double()
    return weight_D.double() * wide / (wide.pow(2).mean() + SHAPE.rms_norm_eps).sqrt()


def attended(setting: Setting, pass_name: str, visit: LayerVisit, qkv: torch.Tensor, row: int) -> torch.Tensor:
    """Attention `[H * D]` of one row over every key that the rule of cycles shows, one key after the other.

    `qkv` has been normed and rotated, and the rows that are kept have been stored.
    """
    rows, final = setting.rows(pass_name)
    method, heads, groups, width = setting.schedule.method, 6, 2, SHAPE.head_dim
    is_shadow = lambda other: pass_name == PARALLEL and other in final  # noqa: E731
    stored_real = pass_name == SEQUENTIAL or method.history == "real"
    q, k, v = (part.view(len(rows), -1, width).double() for part in qkv.split([heads * width, groups * width, groups * width], 1))
    slot = rows.chunk[row]
    keys = [
        (stored_real, entry, *setting.entry(visit, slot, entry))
        for entry in range(setting.store.num_entries(setting.starts[slot] + 1)[visit.group])
    ]
    if method.history == "real":
        keys += [
            (False, rows.position[other], k[other], v[other])
            for other in range(len(rows))
            if rows.chunk[other] == slot and is_shadow(other)
        ]
    seen = [
        (key, value)
        for is_real, position, key, value in keys
        if visible(
            query_is_real=not is_shadow(row),
            query_document=0,
            query_position=rows.position[row],
            key_is_real=is_real,
            key_document=0,
            key_position=position,
            cycle_length=method.cycle_length,
            history=method.history,
            block_attention=method.block_attention,
            window=visit.attention.window,
        )
    ]
    out = []
    for head in range(heads):
        group = head // (heads // groups)
        scores = torch.stack([q[row, head] @ key[group].double() for key, _ in seen]) / math.sqrt(width)
        weights = scores.softmax(0)
        out.append(sum(weight * value[group].double() for weight, (_, value) in zip(weights, seen)))
    return torch.cat(out)
