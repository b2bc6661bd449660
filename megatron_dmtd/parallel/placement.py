"""Which visits of a schedule, and which copies of the embedding table, live on which pipeline stage, as data.

No torch: `tools/plan.py` reads this without starting anything. Stages are balanced by the weights that they multiply: a visit
counts once for each stream that enters it (real and shadow in the parallel layers of a Refresh model), the output head as itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dmtd.architecture import Schedule, Visit
from megatron_dmtd.architecture.flops import matrix_weights
from megatron_dmtd.config import Config, ParallelConfig
from megatron_dmtd.config.decoder import schedule_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One pipeline stage: a run of consecutive visits, and the layers that they name."""

    index: int
    """Place in the pipeline, over all ranks and their virtual stages."""
    rank: int
    """Pipeline rank that holds it."""
    virtual: int
    """Which of that rank's stages it is, from 0."""
    first_visit: int
    """Index of its first visit in the schedule, from 0."""
    visits: tuple[Visit, ...]
    """Its visits, in order; at least one."""
    has_input_embedding: bool
    """Whether it embeds the streams that enter the first visit: the first stage."""
    has_split: bool
    """Whether the sequential pass begins here, so that `Embed(x)` is added here."""
    has_output: bool
    """Whether final norm, head and loss are here: the last stage."""

    def __post_init__(self) -> None:
        assert self.visits and self.layers == tuple(range(self.first_layer, self.first_layer + self.num_layers)), self

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose weights live here, from 0, each once."""
        return tuple(dict.fromkeys(visit.layer for visit in self.visits))

    @property
    def first_layer(self) -> int:
        """Index of its first layer, from 0."""
        return self.visits[0].layer

    @property
    def num_layers(self) -> int:
        """Layers whose weights live here."""
        return len(self.layers)

    @property
    def next_visit(self) -> int:
        """Index in the schedule of the visit that follows its last one."""
        return self.first_visit + len(self.visits)

    @property
    def has_embedding(self) -> bool:
        """Whether a copy of the embedding table lives here."""
        return self.has_input_embedding or self.has_split


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """A schedule cut into stages, in order."""

    schedule: Schedule
    stages: tuple[Stage, ...]
    num_ranks: int
    """Pipeline ranks."""

    def __post_init__(self) -> None:
        for index, stage in enumerate(self.stages):
            assert stage.index == index == stage.virtual * self.num_ranks + stage.rank, stage
        assert tuple(visit for stage in self.stages for visit in stage.visits) == self.schedule.visits, self.stages
        assert sum(stage.has_split for stage in self.stages) == (self.schedule.split > 0), self.stages
        layers = [layer for stage in self.stages for layer in stage.layers]
        assert len(set(layers)) == len(layers), f"a layer on two stages: {layers}"

    def stages_of(self, rank: int) -> tuple[Stage, ...]:
        """The stages of a pipeline rank, in order."""
        return tuple(stage for stage in self.stages if stage.rank == rank)

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding table."""
        return self.schedule.decoder.tie_word_embeddings

    @property
    def table_ranks(self) -> tuple[int, ...]:
        """Pipeline ranks that hold a copy of the embedding table."""
        return tuple(sorted({self.stages[index].rank for index in self.table_stages}))

    @property
    def table_stages(self) -> tuple[int, ...]:
        """Stages with a copy of the embedding table: as input, at the split, or as tied head. The copies are kept equal."""
        return tuple(stage.index for stage in self.stages if stage.has_embedding or (self.tied and stage.has_output))


def visit_cost(schedule: Schedule, visit: Visit) -> int:
    """Weights that multiply each token of a visit, once for each stream that enters."""
    return len(visit.streams) * matrix_weights(schedule.layer(visit), schedule.decoder.hidden_size)


def head_cost(schedule: Schedule) -> int:
    """Weights of the output head."""
    return schedule.decoder.vocab_size * schedule.decoder.hidden_size


def _cut(costs: list[int], num_stages: int) -> list[int]:
    """Lengths of `num_stages` runs of at least one item whose largest sum is smallest (dynamic programming)."""
    total = len(costs)
    prefix = [0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    best: dict[tuple[int, int], tuple[int, list[int]]] = {(0, 0): (0, [])}
    for stage in range(1, num_stages + 1):
        for end in range(stage, total - (num_stages - stage) + 1):
            options = [
                (max(best[stage - 1, start][0], prefix[end] - prefix[start]), [*best[stage - 1, start][1], end - start])
                for start in range(stage - 1, end)
                if (stage - 1, start) in best
            ]
            best[stage, end] = min(options)
    return best[num_stages, total][1]


def _largest(costs: list[int], counts: list[int]) -> int:
    start, largest = 0, 0
    for count in counts:
        largest = max(largest, sum(costs[start : start + count]))
        start += count
    return largest


def _parts(schedule: Schedule) -> list[list[int]]:
    """Indices of the visits that must be on one stage together: a whole loop, or a single visit."""
    parts: list[list[int]] = []
    for index, visit in enumerate(schedule.visits):
        if visit.loop and index and schedule.visits[index - 1].loop:
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts


def stage_visits(schedule: Schedule, *, num_stages: int) -> tuple[int, ...]:
    """Visits per stage, balanced by cost, with a boundary at the split if there is more than one stage."""
    parts = _parts(schedule)
    costs = [sum(visit_cost(schedule, schedule.visits[index]) for index in part) for part in parts]
    costs[-1] += head_cost(schedule)
    split = sum(part[-1] < schedule.split for part in parts)
    counts = _balanced(costs, split, num_stages)
    ends = [sum(counts[: stage + 1]) for stage in range(num_stages)]
    return tuple(sum(map(len, parts[end - count : end])) for count, end in zip(counts, ends, strict=True))


def _balanced(costs: list[int], split: int, num_stages: int) -> list[int]:
    """Items per stage."""
    if num_stages == 1 or split == 0:
        return _cut(costs, num_stages)
    candidates = []
    for before in range(1, num_stages):
        after = num_stages - before
        if before <= split and after <= len(costs) - split:
            counts = _cut(costs[:split], before) + _cut(costs[split:], after)
            candidates.append((_largest(costs, counts), counts))
    return min(candidates)[1]


def _visits_of_layers(schedule: Schedule, stage_layers: tuple[int, ...]) -> tuple[int, ...]:
    """Visits per stage, from layers per stage; no stage ends inside a loop."""
    counts, first = [], 0
    for layers in stage_layers:
        counts.append(sum(first <= visit.layer < first + layers for visit in schedule.visits))
        first += layers
    return tuple(counts)


def place_schedule(schedule: Schedule, parallel: ParallelConfig) -> Placement:
    """A schedule on the pipeline of a validated layout: as configured, or balanced by cost."""
    if parallel.stage_layers:
        counts = _visits_of_layers(schedule, parallel.stage_layers)
    else:
        counts = stage_visits(schedule, num_stages=parallel.pipeline * parallel.virtual_stages)
    stages, first = [], 0
    for index, count in enumerate(counts):
        stages.append(
            Stage(
                index=index,
                rank=index % parallel.pipeline,
                virtual=index // parallel.pipeline,
                first_visit=first,
                visits=schedule.visits[first : first + count],
                has_input_embedding=index == 0,
                has_split=schedule.split > 0 and first <= schedule.split < first + count,
                has_output=index == len(counts) - 1,
            )
        )
        first += count
    return Placement(schedule=schedule, stages=tuple(stages), num_ranks=parallel.pipeline)


def place(config: Config) -> Placement:
    """The placement of a validated configuration."""
    return place_schedule(schedule_of(config.model, config.cycle), config.parallel)
