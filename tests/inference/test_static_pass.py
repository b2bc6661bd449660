"""Rows in shapes that repeat read and store what the same rows do as they come."""

import pytest
import torch

from megatron_dmtd.architecture.schedule import PARALLEL, SEQUENTIAL
from megatron_dmtd.inference.static_pass import num_pages_read, padded
from tests.inference.ops.passes_to_try import PAGE_SIZE, Setting
from tests.oracles.parallel_dmtd import FOUR_VARIANTS

each_kind = pytest.mark.parametrize("kind", FOUR_VARIANTS, ids=["-".join(kind) for kind in FOUR_VARIANTS])


def test_numbers_are_padded_to_powers_of_two_up_to_their_limit():
    assert [padded(count, 6) for count in range(1, 7)] == [1, 2, 4, 4, 6, 6]
    with pytest.raises(AssertionError):
        padded(7, 6)


@each_kind
@pytest.mark.parametrize("num_chunks", [2, 3])
def test_columns_are_those_of_the_plan_and_what_fills_a_shape_is_nobodys(kind, num_chunks):
    setting = Setting(*kind)
    for pass_name in (PARALLEL, SEQUENTIAL):
        rows, run = setting.rows(pass_name)[0], setting.static(pass_name, num_chunks=num_chunks)
        count = len(rows)
        assert run.position_R.tolist()[:count] == rows.position and run.token_id_R.tolist()[:count] == rows.token_id
        assert run.phase_R.tolist()[:count] == rows.phase and run.entry_R.tolist()[:count] == rows.entry
        assert run.slot_R.tolist()[:count] == rows.chunk
        assert set(run.slot_R.tolist()[count:]) <= {2} and set(run.entry_R.tolist()[count:]) <= {-1}
        assert run.slot_B.tolist() == [0, 1, 2][:num_chunks]


@each_kind
@pytest.mark.parametrize("final_only", [False, True])
@pytest.mark.parametrize("starts", [(36, 20), (8, 32), (0, 40)])
def test_rows_read_the_same_entries_and_the_same_rows_of_their_block(kind, final_only, starts):
    setting = Setting(*kind, starts=starts)
    for pass_name in (PARALLEL, SEQUENTIAL):
        run, static = setting.dynamic(pass_name), setting.static(pass_name)
        rows, final = setting.rows(pass_name)
        for group in setting.schedule.pass_groups(pass_name):
            reads = rows.reads(group.window)
            (batch,) = static.addresses(group.name).batches(final_only=final_only)
            table = setting.tables.by_group[group.name].page_SP
            found = {}
            for chunk, query_Q in enumerate(batch.query_BQ.tolist()):
                pages = batch.page_BP[chunk].tolist()
                for number, query in enumerate(query_Q):
                    keys = batch.mask_BQK[chunk, number].nonzero()[:, 0].tolist()
                    found[query] = [(pages[key // PAGE_SIZE], key % PAGE_SIZE) for key in keys]
            rows_per_chunk = max(stop - start for start, stop in run.chunk_runs)
            num_blank = rows_per_chunk * 2 - len(rows)  # a first cycle has nothing to refresh
            for row in final if final_only else range(len(rows)):
                slot = rows.chunk[row]
                entries = range(reads.entry_begin[row], reads.entry_end[row])
                expected = [(int(table[slot, entry // PAGE_SIZE]), entry % PAGE_SIZE) for entry in entries]
                local = range(reads.local_begin[row] - rows.local_begin[row], reads.local_end[row] - rows.local_begin[row])
                expected += [(setting.store.num_pages + slot, offset) for offset in local]
                assert found[row + (num_blank if starts[0] == 0 else 0)] == expected, (pass_name, group.name, row)


def test_pages_before_a_window_are_not_read():
    rows = Setting("real", "causal", starts=(60, 20)).plan.sequential
    assert num_pages_read(rows, None, PAGE_SIZE) == 4
    assert num_pages_read(rows, 18, PAGE_SIZE) == 2
    assert num_pages_read(rows, 5, PAGE_SIZE) == 1


def test_a_second_step_of_the_same_shape_forgets_the_first():
    setting = Setting("shadow", "causal")
    run = setting.static(SEQUENTIAL)
    addresses = run.addresses("sequential/full/2x16")
    first = addresses.stored, addresses.batches(final_only=False)[0].mask_BQK.clone()
    later = Setting("shadow", "causal", starts=(40, 24))
    run.fill(later.plan.sequential, later.plan.sequential.chunk)
    assert torch.equal(addresses.stored.offset, first[0].offset), "kept until the next step begins"
    run.begin()
    assert addresses.stored.offset.tolist() == [40 % PAGE_SIZE, 24 % PAGE_SIZE]
    assert addresses.batches(final_only=False)[0].mask_BQK.sum() == first[1].sum() + 8
