"""Rows of a plan as tensors: which are stored where, which chunks attend together, and what each row reads."""

import torch

from megatron_dmtd.inference.kv.device_tables import DeviceTable
from megatron_dmtd.inference.kv.pages import PageTable
from megatron_dmtd.inference.passes import GroupColumns, Pass, pages_from
from megatron_dmtd.inference.planner import Chunk, plan_step
from tests.inference.kv.stores import method_of, mixed_store, small_store

CPU = torch.device("cpu")


def parallel_pass(variant: str, chunks: list[Chunk], *, store=None) -> Pass:
    """The parallel pass of a step, with four entries per page; page i of slot s is 10 * s + i."""
    store = store or small_store(variant, page_size=4)
    groups = [group.group for group in store.groups.values() if group.group.pass_name == "parallel"]
    plan, tables = plan_step(method_of(variant), chunks), {}
    for group in groups:
        tables[group.name] = DeviceTable(2, 4, CPU)
        for slot in range(2):
            tables[group.name].update(slot, PageTable(10 * slot + page for page in range(4)))
    slots = [chunks[chunk].slot for chunk in plan.parallel.chunk]
    return Pass(rows=plan.parallel, slots=slots, final=plan.outputs, groups=GroupColumns(groups, tables), page_size=4)


def test_rows_are_batched_by_chunk_and_each_reads_what_the_plan_says():
    chunks = [Chunk(slot=0, tokens=[1] * 9, start=8, stop=9), Chunk(slot=1, tokens=[2], start=0, stop=1)]
    run = parallel_pass("bidirectional-refresh", chunks)
    assert len(run) == 12 and run.ends_early and run.chunk_runs == [(0, 8), (8, 12)]
    assert run.all_runs.row_start.tolist() == [0, 8, 12]
    assert run.final_runs.row.tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert run.final_runs.query_start.tolist() == [0, 4, 8]
    addresses = run.addresses("parallel")
    batches = addresses.batches(final_only=False)
    assert [batch.query_BQ.tolist() for batch in batches] == [[list(range(8))], [[8, 9, 10, 11]]]
    first, second = batches
    assert (first.page_BP.tolist(), second.page_BP.shape) == ([[0, 1]], (1, 0))
    assert first.mask_BQK[0].sum(dim=1).tolist() == [5, 6, 7, 8, 12, 12, 12, 12]
    assert second.mask_BQK.tolist() == [[[True] * 4] * 4]
    row, page, offset = addresses.stored
    assert (row.tolist(), page.tolist(), offset.tolist()) == ([0, 1, 2, 3], [1, 1, 1, 1], [0, 1, 2, 3])


def test_a_window_is_read_from_its_first_page_on():
    """A causal block from 12 with a window of 6, four entries per page: rows 12 to 15 see keys from 7, 8, 9 and 10 on."""
    chunks = [Chunk(slot=1, tokens=[1] * 13, start=12, stop=13)]
    run = parallel_pass("causal-norefresh", chunks, store=mixed_store("causal-norefresh", page_size=4))
    full, window = (run.addresses(f"parallel/{name}/2x8").batches(final_only=False)[0] for name in ("full", "window-6"))
    assert (full.page_BP.tolist(), window.page_BP.tolist()) == ([[10, 11, 12, 13]], [[11, 12, 13]])
    assert [row.nonzero()[:, 0].tolist() for row in full.mask_BQK[0]] == [list(range(end)) for end in (13, 14, 15, 16)]
    seen = [(row.nonzero()[:, 0] + 4).tolist() for row in window.mask_BQK[0]]
    assert seen == [list(range(end - 6, end)) for end in (13, 14, 15, 16)]


def test_groups_of_one_window_share_their_columns():
    run = parallel_pass("causal-norefresh", [Chunk(slot=0, tokens=[1], start=0, stop=1)])
    assert len(run.numbers) == 5 + 4
    mixed = parallel_pass(
        "causal-norefresh", [Chunk(slot=0, tokens=[1], start=0, stop=1)], store=mixed_store("causal-norefresh", page_size=4)
    )
    assert len(mixed.numbers) == 5 + 2 * 4
    assert len({mixed.addresses(name).first_column for name in ("parallel/full/2x8", "parallel/window-6/2x8")}) == 2


def test_pages_beyond_the_end_of_a_table_hold_entries_that_no_mask_shows():
    page_BP, entry_BK = pages_from(torch.tensor([[7, 8, 9], [4, 5, 6]]), torch.tensor([0, 2]), 2, 2)
    assert page_BP.tolist() == [[7, 8], [6, 6]]
    assert entry_BK.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
