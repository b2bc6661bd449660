import torch

from megatron_dmtd.cycle import Method
from megatron_dmtd.inference.kv.pages import PageTable
from megatron_dmtd.inference.passes import BlockTables, Pass
from megatron_dmtd.inference.planner import Chunk, plan_step

CPU = torch.device("cpu")
METHOD = Method(variant="bidirectional-refresh", cycle_length=4, mask_token_id=9, num_parallel_layers=2)


def test_only_new_pages_are_written_and_another_table_starts_anew():
    tables = BlockTables(2, 4, CPU)
    first = PageTable([7, 5])
    tables.update(1, first)
    first.pages.append(3)
    tables.update(1, first)
    assert tables.page_SP.tolist() == [[0, 0, 0, 0], [7, 5, 3, 0]]
    tables.update(1, PageTable([2, 9]))
    assert tables.page_SP[1, :2].tolist() == [2, 9]


def test_rows_are_grouped_by_chunk_and_each_reads_what_the_plan_says():
    chunks = [Chunk(slot=0, tokens=[1] * 9, start=8, stop=9), Chunk(slot=1, tokens=[2], start=0, stop=1)]
    plan = plan_step(METHOD, chunks)
    slots = [chunks[chunk].slot for chunk in plan.parallel.chunk]
    run = Pass(rows=plan.parallel, slots=slots, final=plan.outputs, tables=BlockTables(2, 4, CPU), page_size=4)
    assert len(run) == 12 and run.ends_early and run.max_rows_per_chunk == 8
    assert run.all_runs.row_start.tolist() == [0, 8, 12]
    assert run.final_runs.row.tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert run.final_runs.query_start.tolist() == [0, 4, 8]
    assert [group.query_Br.tolist() for group in run.groups] == [[list(range(8))], [[8, 9, 10, 11]]]
    first, second = run.groups
    assert (first.page_Bn.shape, second.page_Bn.shape) == ((1, 2), (1, 0))
    assert first.mask_BrK[0].sum(dim=1).tolist() == [5, 6, 7, 8, 12, 12, 12, 12]
    assert second.mask_BrK.tolist() == [[[True] * 4] * 4]
    assert run.written[0].tolist() == [0, 1, 2, 3]
    assert run.written[2].tolist() == [0, 1, 2, 3]
