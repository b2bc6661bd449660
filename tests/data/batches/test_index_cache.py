import json
import multiprocessing
import os
import time

import numpy as np
import pytest

from megatron_dmtd.data.batches.dataset import PackedDataset
from megatron_dmtd.data.batches.index_cache import cached
from megatron_dmtd.errors import DataError

KEY = {"corpus": "a", "epoch": 0}


def build():
    return {"numbers": np.arange(10)}, {"total": 45}


def never():
    raise AssertionError("it is there already")


def test_an_entry_is_built_once_and_mapped_from_then_on(tmp_path):
    arrays, numbers = cached(tmp_path / "new" / "cache", KEY, build)
    again, _ = cached(tmp_path / "new" / "cache", KEY, never)
    assert numbers == {"total": 45} and again["numbers"].tolist() == list(range(10))
    assert isinstance(arrays["numbers"], np.memmap) and isinstance(again["numbers"], np.memmap)
    with pytest.raises(AssertionError, match="it is there"):
        cached(tmp_path / "new" / "cache", {**KEY, "epoch": 1}, never)


def slow_build(log):
    with log.open("a") as stream:
        stream.write("built\n")
    time.sleep(0.3)
    return build()


def race(folder, log, ready):
    ready.wait()
    arrays, _ = cached(folder, KEY, lambda: slow_build(log))
    os._exit(0 if arrays["numbers"].tolist() == list(range(10)) else 1)


def test_jobs_that_race_build_once(tmp_path):
    context = multiprocessing.get_context("fork")
    ready = context.Barrier(4)
    jobs = [context.Process(target=race, args=(tmp_path / "cache", tmp_path / "log", ready)) for _ in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    assert [job.exitcode for job in jobs] == [0] * 4
    assert (tmp_path / "log").read_text() == "built\n"
    assert not [path for path in (tmp_path / "cache").iterdir() if "partial" in path.name]


def test_where_locks_do_not_reach_the_first_entry_is_kept_and_the_second_changes_nothing(tmp_path):
    def interrupted_by_another():
        cached(tmp_path / "there", KEY, build)
        (entry,) = [path for path in (tmp_path / "there").iterdir() if path.is_dir()]
        (tmp_path / "cache").mkdir(exist_ok=True)
        entry.rename(tmp_path / "cache" / entry.name)  # a node that does not see our lock was faster
        return build()

    arrays, _ = cached(tmp_path / "cache", KEY, interrupted_by_another)
    assert arrays["numbers"].tolist() == list(range(10))
    assert not [path for path in (tmp_path / "cache").iterdir() if "partial" in path.name]


def test_a_builder_that_is_killed_leaves_nothing_that_is_read(tmp_path):
    def killed():
        os._exit(9)

    child = os.fork()
    if child == 0:
        cached(tmp_path, KEY, killed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert cached(tmp_path, KEY, build)[1] == {"total": 45}


def damaged(tmp_path, change):
    cached(tmp_path, KEY, build)
    (entry,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    change(entry)
    return entry


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda entry: (entry / "numbers.npy").write_bytes(b"x"), "of another size"),
        (lambda entry: (entry / "numbers.npy").unlink(), "No such file"),
        (lambda entry: (entry / "meta.json").write_text("{"), "Expecting"),
        (lambda entry: (entry / "meta.json").write_text("{}"), "sizes"),
    ],
)
def test_a_damaged_entry_is_refused_by_name(tmp_path, change, found):
    entry = damaged(tmp_path, change)
    with pytest.raises(DataError, match=found) as caught:
        cached(tmp_path, KEY, never)
    assert str(entry) in caught.value.found and "delete" in caught.value.remedy


@pytest.mark.parametrize("place", ["file", "file/cache", "/proc/cache", "n" * 300])
def test_a_folder_that_cannot_be_written_names_the_setting(tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"data\.cache_dir"):
        cached(tmp_path / place, KEY, build)


DOCUMENTS = [[100 * d + i for i in range(1, 2 + 5 * d % 13)] for d in range(1, 41)]


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
def test_a_cached_corpus_has_the_rows_of_an_uncached_one_and_nodes_agree_without_a_common_disk(write_tokens, tmp_path, packing):
    options = {"seq_length": 16, "cycle_length": 4, "pad_token_id": 0, "shuffle_seed": 3, "packing": packing}
    prefix = write_tokens(DOCUMENTS)
    plain = PackedDataset([prefix], **options)
    nodes = [PackedDataset([prefix], **options, cache_dir=str(tmp_path / node)) for node in ("one", "one", "other")]
    for index in range(3 * plain.rows_per_epoch):
        for node in nodes:
            np.testing.assert_array_equal(node[index].tokens_N, plain[index].tokens_N)
            np.testing.assert_array_equal(node[index].loss_mask_N, plain[index].loss_mask_N)
    assert nodes[0].counts == plain.counts
    assert all(isinstance(array, np.memmap) for array in nodes[1]._plan(0).arrays.values())
    assert sum(path.is_dir() for path in (tmp_path / "one").iterdir()) == 3  # one per epoch, shared by two


def test_another_corpus_of_the_same_name_has_another_entry(write_tokens, tmp_path):
    options = {"seq_length": 16, "cycle_length": 4, "pad_token_id": 0, "shuffle_seed": 3, "cache_dir": str(tmp_path / "cache")}
    first = PackedDataset([write_tokens(DOCUMENTS)], **options).counts
    assert PackedDataset([write_tokens(DOCUMENTS[:9])], **options).counts != first
    metas = [json.loads(path.read_text()) for path in (tmp_path / "cache").glob("*/meta.json")]
    assert len(metas) == 2 and {meta["key"]["packing"] for meta in metas} == {"concatenate"}


def test_opening_a_cached_corpus_costs_no_memory_per_document(tmp_path):
    import tracemalloc

    from tests.data.batches.test_token_file import own_file

    prefix = own_file(tmp_path, [[1, 2, 3]] * 200_000, np.uint16)
    options = {"seq_length": 16, "cycle_length": 4, "pad_token_id": 0, "shuffle_seed": 3, "cache_dir": str(tmp_path / "cache")}
    PackedDataset([prefix], **options)
    tracemalloc.start()
    dataset = PackedDataset([prefix], **options)
    dataset[dataset.rows_per_epoch // 2]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert dataset.num_documents == 200_000 and peak < 2**18  # its lengths alone are 1.6 MB
