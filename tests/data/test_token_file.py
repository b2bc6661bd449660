import struct
from pathlib import Path

import numpy as np
import pytest

from megatron_dmtd.data.token_file import TokenFile
from megatron_dmtd.errors import DataError

DOCUMENTS = [[1, 2, 3, 4], [5], [6, 7, 8]]


def test_documents_are_read_back_in_parts(write_tokens):
    file = TokenFile(write_tokens(DOCUMENTS))
    assert len(file) == 3
    assert file.document_lengths_D.tolist() == [4, 1, 3]
    assert file.document_lengths_D.dtype == np.int64
    assert file.read(0, 1, 3).tolist() == [2, 3, 4]
    assert file.read(2, 0, 3).tolist() == [6, 7, 8]


def test_a_read_never_leaves_its_document(write_tokens):
    file = TokenFile(write_tokens(DOCUMENTS))
    with pytest.raises(AssertionError, match=r"\(0, 1, 4\)"):
        file.read(0, 1, 4)


def test_empty_documents_are_documents(write_tokens):
    file = TokenFile(write_tokens([[1, 2], [], [3], []]))
    assert file.document_lengths_D.tolist() == [2, 0, 1, 0]
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
    assert file.document_lengths_D.tolist() == [5, 2]
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
