"""Which layers and embedding copies live on which pipeline stage, as data.

No torch: `tools/plan.py` reads this without starting anything. Stage balance uses the cost of a layer in streams: a parallel
layer of a Refresh model carries two token streams (real and shadow), every other layer one.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dmtd.config import Config, CycleConfig, ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One pipeline stage: a run of consecutive layers."""

    index: int
    """Place in the pipeline, over all ranks and their virtual stages."""
    rank: int
    """Pipeline rank that holds it."""
    virtual: int
    """Which of that rank's stages it is, from 0."""
    first_layer: int
    """Index of its first layer, from 0."""
    num_layers: int
    """Its layers; at least one."""
    has_input_embedding: bool
    """Whether it embeds the parallel (or, for vanilla, the only) stream: the first stage."""
    has_split: bool
    """Whether the first sequential layer is here, so that `Embed(x)` is added here."""
    has_output: bool
    """Whether final norm, head and loss are here: the last stage."""

    @property
    def layers(self) -> range:
        """The layers of this stage, from 0."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def has_embedding(self) -> bool:
        """Whether a copy of the embedding table lives here."""
        return self.has_input_embedding or self.has_split


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """All stages, in order."""

    stages: tuple[Stage, ...]
    num_ranks: int
    """Pipeline ranks."""
    tied: bool
    """Whether the output head is the embedding table."""

    def __post_init__(self) -> None:
        expected = 0
        for index, stage in enumerate(self.stages):
            assert stage.index == index and stage.num_layers >= 1 and stage.first_layer == expected, stage
            assert stage.index == stage.virtual * self.num_ranks + stage.rank, stage
            expected += stage.num_layers
        assert sum(stage.has_split for stage in self.stages) <= 1, self.stages

    def stages_of(self, rank: int) -> tuple[Stage, ...]:
        """The stages of a pipeline rank, in order."""
        return tuple(stage for stage in self.stages if stage.rank == rank)

    @property
    def table_ranks(self) -> tuple[int, ...]:
        """Pipeline ranks that hold a copy of the embedding table."""
        return tuple(sorted({self.stages[index].rank for index in self.table_stages}))

    @property
    def table_stages(self) -> tuple[int, ...]:
        """Stages with a copy of the embedding table: as input, at the split, or as tied head. The copies are kept equal."""
        return tuple(stage.index for stage in self.stages if stage.has_embedding or (self.tied and stage.has_output))


def num_parallel_layers(model: ModelConfig, cycle: CycleConfig) -> int:
    """Parallel layers of the model: none in a vanilla one."""
    del model
    return 0 if cycle.is_vanilla else cycle.num_parallel_layers


def layer_costs(model: ModelConfig, cycle: CycleConfig) -> list[float]:
    """Relative cost of each layer, in token streams."""
    parallel = num_parallel_layers(model, cycle)
    streams = 2.0 if not cycle.is_vanilla and cycle.history == "real" else 1.0
    return [streams if layer < parallel else 1.0 for layer in range(model.num_layers)]


def head_cost(model: ModelConfig) -> float:
    """Cost of the output head in layers of this model: the ratio of their weights."""
    attention = model.hidden_size * model.head_dim * (2 * model.num_attention_heads + 2 * model.num_key_value_heads)
    return model.vocab_size * model.hidden_size / (attention + 3 * model.hidden_size * model.intermediate_size)


def _spread(costs: list[float], stages: int) -> list[int]:
    """Cut `costs` into `stages` runs of at least one item whose largest sum is smallest (dynamic programming)."""
    total = len(costs)
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    best: dict[tuple[int, int], tuple[float, list[int]]] = {(0, 0): (0.0, [])}
    for stage in range(1, stages + 1):
        for end in range(stage, total - (stages - stage) + 1):
            options = [
                (max(best[stage - 1, start][0], prefix[end] - prefix[start]), [*best[stage - 1, start][1], end - start])
                for start in range(stage - 1, end)
                if (stage - 1, start) in best
            ]
            best[stage, end] = min(options)
    return best[stages, total][1]


def _largest(costs: list[float], counts: list[int]) -> float:
    start, largest = 0, 0.0
    for count in counts:
        largest = max(largest, sum(costs[start : start + count]))
        start += count
    return largest


def stage_layers(config: Config) -> tuple[int, ...]:
    """Layers per stage: as configured, or balanced by cost with a boundary at the parallel/sequential split."""
    parallel, model, cycle = config.parallel, config.model, config.cycle
    if parallel.stage_layers:
        return parallel.stage_layers
    costs = layer_costs(model, cycle)
    costs[-1] += head_cost(model)
    split = num_parallel_layers(model, cycle)
    num_stages = parallel.pipeline * parallel.virtual_stages
    if num_stages == 1 or split == 0:
        return tuple(_spread(costs, num_stages))
    candidates = []
    for before in range(1, num_stages):
        after = num_stages - before
        if before <= split and after <= model.num_layers - split:
            counts = _spread(costs[:split], before) + _spread(costs[split:], after)
            candidates.append((_largest(costs, counts), counts))
    return tuple(min(candidates)[1])


def place(config: Config) -> Placement:
    """The placement of a validated configuration."""
    counts = stage_layers(config)
    split = num_parallel_layers(config.model, config.cycle)
    stages, first = [], 0
    for index, count in enumerate(counts):
        stages.append(
            Stage(
                index=index,
                rank=index % config.parallel.pipeline,
                virtual=index // config.parallel.pipeline,
                first_layer=first,
                num_layers=count,
                has_input_embedding=index == 0,
                has_split=split > 0 and first <= split < first + count,
                has_output=index == len(counts) - 1,
            )
        )
        first += count
    return Placement(stages=tuple(stages), num_ranks=config.parallel.pipeline, tied=config.model.tie_word_embeddings)
