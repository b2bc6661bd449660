"""Plans against the examples of docs/method.md, and against the control-flow oracle over random workloads."""

import random

import pytest

from megatron_dmtd.cycle import ORDINARY, VARIANTS, Method, visible
from megatron_dmtd.inference.planner import Chunk, Kept, StepPlan, plan_step
from tests.oracles.scheduling import Walk

M = 99
NAMES = sorted(VARIANTS)


def method(variant: str, cycle_length: int = 4) -> Method:
    if variant == "vanilla":
        return ORDINARY
    return Method(variant=variant, cycle_length=cycle_length, mask_token_id=M, num_parallel_layers=2)


def tokens(count: int) -> list[int]:
    return [100 + position for position in range(count)]


def step(variant: str, start: int, stop: int) -> StepPlan:
    return plan_step(method(variant), [Chunk(slot=0, tokens=tokens(stop), start=start, stop=stop)])


# docs/method.md, sections 7.3 and 10, literally.


def test_a_complete_bidirectional_refresh_cycle_is_that_of_section_10():
    head = step("bidirectional-refresh", 8, 9)
    rows = head.parallel
    assert rows.token_id == [104, 105, 106, 107, 108, M, M, M]
    assert rows.position == [4, 5, 6, 7, 8, 9, 10, 11]
    assert rows.entry == [4, 5, 6, 7, -1, -1, -1, -1]
    assert rows.phase == [0, 1, 2, 3] * 2
    assert rows.entry_end == [5, 6, 7, 8, 8, 8, 8, 8]
    assert list(zip(rows.local_begin, rows.local_end)) == [(0, 0)] * 4 + [(4, 8)] * 4
    assert head.outputs == [4, 5, 6, 7]
    assert head.kept == [Kept(slot=0, first_output=0)]
    assert (head.sequential.token_id, head.sequential.position, head.from_output) == ([108], [8], [-1])
    for position in (9, 10, 11):
        inner = step("bidirectional-refresh", position, position + 1)
        assert (len(inner.parallel), inner.kept) == (0, [])
        assert inner.sequential.position == [position]
        assert inner.sequential.entry_end == [position + 1]
    following = step("bidirectional-refresh", 12, 13)
    assert following.parallel.token_id == [108, 109, 110, 111, 112, M, M, M]


def test_a_causal_refresh_block_sees_itself_up_to_each_slot():
    rows = step("causal-refresh", 8, 9).parallel
    assert rows.entry_end == [5, 6, 7, 8, 8, 8, 8, 8]
    assert list(zip(rows.local_begin, rows.local_end)) == [(0, 0)] * 4 + [(4, 5), (4, 6), (4, 7), (4, 8)]


def test_the_first_cycle_has_nothing_to_refresh():
    plan = step("bidirectional-refresh", 0, 1)
    assert plan.parallel.token_id == [100, M, M, M]
    assert plan.parallel.entry == [-1] * 4


@pytest.mark.parametrize(
    ("variant", "history"), [("causal-norefresh", [9, 10, 11, 12]), ("bidirectional-norefresh", [12, 12, 12, 12])]
)
def test_norefresh_appends_its_block_and_computes_no_real_token_again(variant, history):
    plan = step(variant, 8, 9)
    assert plan.parallel.token_id == [108, M, M, M]
    assert plan.parallel.entry == [8, 9, 10, 11]
    assert plan.parallel.entry_end == history
    assert plan.parallel.local_end == [0] * 4


@pytest.mark.parametrize(
    ("variant", "entries"),
    [
        ("causal-refresh", [0, 0, 0, 0, 0, 4, 4, 4, 4, 8]),
        ("bidirectional-norefresh", [0, 4, 4, 4, 4, 8, 8, 8, 8, 12]),
        ("vanilla", [0] * 10),
    ],
)
def test_entries_of_the_parallel_pass_are_those_of_section_9(variant, entries):
    assert [method(variant).parallel_entries(count) for count in range(10)] == entries


def test_a_vanilla_step_has_sequential_rows_only():
    plan = plan_step(method("vanilla"), [Chunk(slot=3, tokens=tokens(5), start=2, stop=5)])
    assert len(plan.parallel) == 0
    assert (plan.sequential.position, plan.from_output, plan.last_rows) == ([2, 3, 4], [-1, -1, -1], [2])


def test_rows_of_several_requests_share_one_pass_without_seeing_each_other():
    chunks = [Chunk(slot=5, tokens=tokens(9), start=8, stop=9), Chunk(slot=2, tokens=tokens(13), start=12, stop=13)]
    plan = plan_step(method("bidirectional-refresh"), chunks)
    assert plan.parallel.chunk == [0] * 8 + [1] * 8
    assert plan.kept == [Kept(slot=5, first_output=0), Kept(slot=2, first_output=4)]
    assert plan.parallel.local_begin[12:] == [12] * 4
    assert plan.last_rows == [0, 1]


def test_a_chunk_that_starts_inside_a_cycle_ends_with_it():
    assert method("causal-refresh").furthest_stop(5, 30) == 8
    assert method("causal-refresh").furthest_stop(5, 6) == 6
    assert method("causal-refresh").furthest_stop(8, 30) == 30
    assert method("vanilla").furthest_stop(5, 30) == 30
    with pytest.raises(AssertionError, match="5, 9"):
        step("causal-refresh", 5, 9)


# Windows.


@pytest.mark.parametrize("window", [1, 2, 3, 5, 6, 7, 100])
@pytest.mark.parametrize("variant", [*NAMES, "vanilla"])
def test_a_window_hides_exactly_what_the_rule_of_cycles_hides(variant, window):
    """Every (row, key) pair of prompts cut into different chunks: the window's ranges show what `visible(window=)` shows."""
    own, num_hidden = method(variant), 0
    for stops in ([14], [5, 8, 13, 14], list(range(1, 15))):
        start = 0
        for stop in stops:
            chunks = [
                Chunk(slot=0, tokens=tokens(7), start=6, stop=7),
                Chunk(slot=1, tokens=tokens(stop), start=start, stop=stop),
            ]
            plan = plan_step(own, chunks)
            for rows, outputs in ((plan.parallel, set(plan.outputs)), (plan.sequential, set())):
                reads = rows.reads(window)
                for row in range(len(rows)):
                    keys = [(own.history == "real" or rows is plan.sequential, entry) for entry in range(rows.entry_end[row])]
                    local = range(rows.local_begin[row], rows.local_end[row])
                    keys += [(False, rows.position[other]) for other in local]
                    seen = [reads.entry_begin[row] <= entry < reads.entry_end[row] for entry in range(rows.entry_end[row])]
                    seen += [reads.local_begin[row] <= other < reads.local_end[row] for other in local]
                    expected = [
                        visible(
                            query_is_real=row not in outputs,
                            query_document=0,
                            query_position=rows.position[row],
                            key_is_real=is_real,
                            key_document=0,
                            key_position=position,
                            cycle_length=own.cycle_length,
                            history=own.history,
                            block_attention=own.block_attention,
                            window=window,
                        )
                        for is_real, position in keys
                    ]
                    assert seen == expected, (row, keys)
                    num_hidden += seen.count(False)
            start = stop
    assert (num_hidden > 0) == (window < 14)


def test_without_a_window_a_row_reads_all_that_it_sees():
    rows = step("bidirectional-refresh", 8, 9).parallel
    assert rows.reads(None) == ([0] * 8, rows.entry_end, rows.local_begin, rows.local_end)


# Against the oracle.


class Replay:
    """Stores of labels, on which plans are executed."""

    def __init__(self, plan_method: Method) -> None:
        self.method = plan_method
        self.parallel: dict[int, str] = {}
        self.sequential: dict[int, str] = {}
        self.saved: list[str] = []

    def labels(self, plan: StepPlan) -> list[str]:
        rows = plan.parallel
        assert self.method.streams[0] == "real" or min(rows.entry, default=0) >= 0
        outputs = set(plan.outputs)
        return [("S" if row in outputs else "R") + str(rows.position[row]) for row in range(len(rows))]

    def execute(self, plan: StepPlan, chunk: int, read: dict[str, frozenset[str]]) -> None:
        rows, labels = plan.parallel, self.labels(plan)
        own = [row for row in range(len(rows)) if rows.chunk[row] == chunk]
        for row in own:
            if rows.entry[row] >= 0:
                self.parallel[rows.entry[row]] = labels[row]
        for row in own:
            history = [self.parallel[entry] for entry in range(rows.entry_end[row])]
            local = range(rows.local_begin[row], rows.local_end[row])
            assert set(local) <= set(own)
            read[labels[row]] = frozenset([*history, *(labels[other] for other in local)])
            is_known = labels[row].startswith("R") or self.method.phase(rows.position[row]) == 0
            assert rows.token_id[row] == (100 + rows.position[row] if is_known else M)
        slot = plan.chunks[chunk].slot
        for kept in plan.kept:
            if kept.slot == slot:
                outputs = plan.outputs[kept.first_output : kept.first_output + self.method.cycle_length]
                self.saved = [labels[row] for row in outputs]
        self._sequential(plan, chunk, labels, read)

    def _sequential(self, plan: StepPlan, chunk: int, labels: list[str], read: dict[str, frozenset[str]]) -> None:
        rows = plan.sequential
        own = [row for row in range(len(rows)) if rows.chunk[row] == chunk]
        for row in own:
            self.sequential[rows.entry[row]] = f"R{rows.position[row]}"
            assert rows.token_id[row] == 100 + rows.position[row]
        for row in own:
            seen = [self.sequential[entry] for entry in range(rows.entry_end[row])]
            if not self.method.is_vanilla:
                source = plan.from_output[row]
                hidden = self.saved[rows.phase[row]] if source < 0 else labels[plan.outputs[source]]
                seen.append(f"hidden {hidden}")
            read[f"T{rows.position[row]}"] = frozenset(seen)


@pytest.mark.parametrize("variant", [*NAMES, "vanilla"])
@pytest.mark.parametrize("cycle_length", [4, 3, 1])
def test_random_workloads_read_and_store_what_the_walk_does(variant, cycle_length):
    generator = random.Random(hash((cycle_length, len(variant))))
    plan_method = method(variant, cycle_length)
    starts_inside, many_cycles = 0, 0
    for _ in range(25):
        requests = 3
        walks = [Walk(variant, plan_method.cycle_length) for _ in range(requests)]
        replays = [Replay(plan_method) for _ in range(requests)]
        done = [0] * requests
        for _ in range(9):
            chosen = generator.sample(range(requests), generator.randint(1, requests))
            stops = [
                plan_method.furthest_stop(done[request], done[request] + generator.choice([1, 1, 2, 5, 11])) for request in chosen
            ]
            chunks = [
                Chunk(slot=request, tokens=tokens(stop), start=done[request], stop=stop) for request, stop in zip(chosen, stops)
            ]
            starts_inside += sum(plan_method.phase(chunk.start) > 0 for chunk in chunks)
            many_cycles += sum(chunk.stop - chunk.start > 2 * cycle_length for chunk in chunks)
            plan = plan_step(plan_method, chunks)
            for index, (request, stop) in enumerate(zip(chosen, stops)):
                read: dict[str, frozenset[str]] = {}
                replays[request].execute(plan, index, read)
                for position in range(done[request], stop):
                    walks[request].take(position)
                for label, seen in read.items():
                    assert walks[request].read[label] == seen, (label, stop)
                done[request] = stop
                assert list(replays[request].parallel.values()) == walks[request].parallel
                assert list(replays[request].sequential.values()) == walks[request].sequential
                assert replays[request].saved == walks[request].saved
                assert plan_method.parallel_entries(stop) == len(walks[request].parallel)
    assert many_cycles > 0
    assert starts_inside > 0 or plan_method.cycle_length == 1
