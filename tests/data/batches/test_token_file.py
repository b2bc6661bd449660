import struct
from pathlib import Path

import numpy as np
import pytest

from megatron_dmtd.data.batches.token_file import TokenFile, token_dtype, write_index
from megatron_dmtd.errors import DataError

DOCUMENTS = [[1, 2, 3, 4], [5], [6, 7, 8]]


def test_documents_are_read_back_in_parts(write_tokens):
    file = TokenFile(write_tokens(DOCUMENTS))
    assert len(file) == 3
    assert file.document_lengths_U.tolist() == [4, 1, 3]
    assert file.document_lengths_U.dtype == np.int64
    assert file.read(0, 1, 3).tolist() == [2, 3, 4]
    assert file.read(2, 0, 3).tolist() == [6, 7, 8]


def test_a_read_never_leaves_its_document(write_tokens):
    file = TokenFile(write_tokens(DOCUMENTS))
    with pytest.raises(AssertionError, match=r"\(0, 1, 4\)"):
        file.read(0, 1, 4)


def test_empty_documents_are_documents(write_tokens):
    file = TokenFile(write_tokens([[1, 2], [], [3], []]))
    assert file.document_lengths_U.tolist() == [2, 0, 1, 0]
    assert file.read(3, 0, 0).tolist() == []
    assert file.read(2, 0, 1).tolist() == [3]


def test_a_document_of_several_sequences_is_read_as_one(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = str(tmp_path / "sentences")
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.int32)
    builder.add_document(np.array([1, 2, 3, 4, 5]), [2, 3])
    builder.add_document(np.array([6, 7]), [1, 1])
    builder.finalize(prefix + ".idx")
    file = TokenFile(prefix)
    assert file.document_lengths_U.tolist() == [5, 2]
    assert file.read(0, 1, 3).tolist() == [2, 3, 4]
    assert file.read(1, 0, 2).tolist() == [6, 7]


def test_a_missing_pair_is_named_whole(tmp_path):
    prefix = str(tmp_path / "absent")
    with pytest.raises(DataError) as caught:
        TokenFile(prefix)
    assert prefix + ".bin" in caught.value.found and prefix + ".idx" in caught.value.found


def test_a_missing_index_is_named_and_both_files_are_required(write_tokens):
    prefix = write_tokens(DOCUMENTS)
    Path(prefix + ".idx").unlink()
    with pytest.raises(DataError) as caught:
        TokenFile(prefix)
    assert caught.value.found == f"no file {prefix}.idx"
    assert prefix + ".bin" in caught.value.required and prefix + ".idx" in caught.value.required


def test_a_foreign_index_is_refused(write_tokens):
    prefix = write_tokens(DOCUMENTS)
    Path(prefix + ".idx").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(DataError, match="an IndexedDataset index"):
        TokenFile(prefix)


def test_a_truncated_index_is_refused(write_tokens):
    prefix = write_tokens(DOCUMENTS)
    whole = Path(prefix + ".idx").read_bytes()
    assert len(whole) == 34 + 3 * 12 + 4 * 8
    Path(prefix + ".idx").write_bytes(whole[:-1])
    with pytest.raises(DataError, match="102 bytes for its 3 sequences"):
        TokenFile(prefix)


def test_a_bin_file_that_is_not_its_indexs_is_refused(write_tokens):
    prefix = write_tokens(DOCUMENTS)
    Path(prefix + ".bin").write_bytes(Path(prefix + ".bin").read_bytes()[:-2])
    with pytest.raises(DataError, match="the 16 bytes that its index describes"):
        TokenFile(prefix)


def test_an_index_without_documents_is_refused(tmp_path):
    prefix = str(tmp_path / "none")
    Path(prefix + ".bin").write_bytes(b"")
    Path(prefix + ".idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 0, 1) + struct.pack("<q", 0))
    with pytest.raises(DataError, match="lists no documents"):
        TokenFile(prefix)


def test_a_file_without_a_token_is_refused(write_tokens):
    with pytest.raises(DataError, match="is empty"):
        TokenFile(write_tokens([[], []]))


def own_file(tmp_path, documents, dtype, name="own"):
    """A token file written by this project's writer alone."""
    (tmp_path / f"{name}.bin").write_bytes(b"".join(np.array(ids, dtype=dtype).tobytes() for ids in documents))
    (tmp_path / "lengths").write_bytes(np.array([len(ids) for ids in documents], dtype=np.int32).tobytes())
    write_index(tmp_path / f"{name}.idx", tmp_path / "lengths", dtype=dtype)
    return str(tmp_path / name)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_an_index_is_byte_for_byte_megatrons(tmp_path, write_tokens, dtype):
    theirs = write_tokens(DOCUMENTS, name="theirs", dtype=dtype)
    ours = own_file(tmp_path, DOCUMENTS, dtype)
    for suffix in (".bin", ".idx"):
        # Megatron appends one byte per sequence, its mode, only for multimodal data
        assert Path(ours + suffix).read_bytes() == Path(theirs + suffix).read_bytes()


def test_the_type_of_the_ids_is_the_one_megatron_chooses():
    from megatron.core.datasets.indexed_dataset import DType

    for size in (300, 65_499, 65_500, 151_669):
        assert token_dtype(size) is DType.optimal_dtype(size)


def test_an_index_longer_than_one_chunk_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_dmtd.data.batches.token_file._CHUNK", 4)
    documents = [[i] * (1 + i) for i in range(11)]
    file = TokenFile(own_file(tmp_path, documents, np.uint16))
    assert [file.read(d, 0, 1 + d).tolist() for d in range(11)] == documents
    assert np.concatenate(list(file.chunks(4))).tolist() == [i for ids in documents for i in ids]
    file.check_index()


def test_files_beyond_2_gib_and_2_to_the_31_tokens_are_read_right_by_us_and_by_megatron(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    lengths = [2**30, 2**30, 3, 2**30 + 5, 4]  # the third document starts at byte 2^33, the last past 3 * 2^32
    (tmp_path / "lengths").write_bytes(np.array(lengths, dtype=np.int32).tobytes())
    write_index(tmp_path / "large.idx", tmp_path / "lengths", dtype=np.int32)
    with (tmp_path / "large.bin").open("wb") as stream:  # sparse: holes take no space
        stream.seek(2**31 * 4)
        stream.write(np.array([7, 8, 9], dtype=np.int32).tobytes())
        stream.seek((sum(lengths) - 4) * 4)
        stream.write(np.array([1, 2, 3, 4], dtype=np.int32).tobytes())
    prefix = str(tmp_path / "large")
    file, theirs = TokenFile(prefix), IndexedDataset(prefix)
    assert file.num_tokens == sum(lengths) > 2**31 and (tmp_path / "large.bin").stat().st_size > 2**33
    file.check_index()
    assert file.document_lengths_U.tolist() == lengths
    for reader in (lambda d, n: file.read(d, 0, n), lambda d, n: theirs.get(d, offset=0, length=n)):
        assert reader(2, 3).tolist() == [7, 8, 9]
        assert reader(3, 2).tolist() == [0, 0]
        assert reader(4, 4).tolist() == [1, 2, 3, 4]


def patched_index(prefix, offset, value):
    index = bytearray(Path(prefix + ".idx").read_bytes())
    index[offset : offset + len(value)] = value
    Path(prefix + ".idx").write_bytes(bytes(index))
    return prefix


@pytest.mark.parametrize(
    ("offset", "value", "found"),
    [
        (9, struct.pack("<Q", 2), "version 2"),
        (17, b"\x06", "type code 6"),  # float64
        (34 + 3 * 12, struct.pack("<q", 1), "the sequences 1 to 3"),
    ],
)
def test_an_index_of_another_kind_is_refused_at_the_opening(write_tokens, offset, value, found):
    with pytest.raises(DataError, match=found):
        TokenFile(patched_index(write_tokens(DOCUMENTS), offset, value))


@pytest.mark.parametrize(
    ("offset", "value", "found"),
    [
        (34 + 3 * 4 + 8, struct.pack("<q", 6), "sequence 1: not where the one before ends"),
        (34, struct.pack("<i", -4), "sequence 1: not|sequence 0: not"),
        (34 + 3 * 12 + 8, struct.pack("<q", 3), "documents that go back"),
    ],
)
def test_a_contradiction_inside_an_index_is_found_by_its_check(write_tokens, offset, value, found):
    file = TokenFile(patched_index(write_tokens(DOCUMENTS), offset, value))
    with pytest.raises(DataError, match=found):
        file.check_index()


def test_opening_reads_no_documents_and_costs_no_memory_per_document(tmp_path):
    """A corpus of 50 million documents opens in bounded memory: its arrays stay on disk."""
    import tracemalloc

    num_documents = 50_000_000
    with (tmp_path / "many.bin").open("wb") as stream:
        stream.truncate(num_documents * 2)
    with (tmp_path / "many.idx").open(
        "wb"
    ) as stream:  # lengths of 0 but the last, offsets 0, bounds 0 .. : sparse but for the ends
        stream.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, num_documents, num_documents + 1))
        stream.seek(34 + 4 * (num_documents - 1))
        stream.write(struct.pack("<i", num_documents))
        stream.seek(34 + 12 * num_documents + 8 * num_documents)
        stream.write(struct.pack("<q", num_documents))
    tracemalloc.start()
    file = TokenFile(str(tmp_path / "many"))
    assert file.lengths(num_documents - 1, num_documents).tolist() == [num_documents]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(file) == num_documents
    assert peak < 2**20  # its lengths alone are 200 MB
