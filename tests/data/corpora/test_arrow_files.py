"""Arrow's own files: rows as from parquet, faults of one row, and no truncation that goes unseen."""

import contextlib

import pyarrow
import pyarrow.feather
import pytest

from megatron_dmtd.data.corpora.arrow_files import check_stream_end
from megatron_dmtd.data.corpora.documents import Document
from megatron_dmtd.data.corpora.sources import open_inputs
from megatron_dmtd.errors import DataError

TEXTS = [f"row {i} é" for i in range(1, 301)]


def write(path, texts, *, stream):
    table = pyarrow.table({"id": range(len(texts)), "text": texts})
    opener = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with opener(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    return path


def entries(path):
    (one,) = open_inputs([str(path)])
    return [entry for block in one.blocks(1000) for entry in block.entries()]


@pytest.mark.parametrize("kind", ["file", "stream", "feather", "compressed"])
def test_rows_are_documents_named_by_their_row(tmp_path, kind):
    path = tmp_path / ("a.feather" if kind in ("feather", "compressed") else "a.arrow")
    if path.suffix == ".feather":
        compression = "zstd" if kind == "compressed" else "uncompressed"
        pyarrow.feather.write_feather(pyarrow.table({"text": TEXTS}), path, compression=compression)
    else:
        write(path, TEXTS, stream=kind == "stream")
    assert entries(path) == [Document(name=f"{path.name}:{row}", text=text) for row, text in enumerate(TEXTS, start=1)]


@pytest.mark.parametrize("stream", [True, False])
def test_every_truncation_is_refused(tmp_path, stream):
    path = write(tmp_path / "whole.arrow", TEXTS[:40], stream=stream)
    whole = path.read_bytes()
    cut = tmp_path / "a.arrow"
    taken_for_whole = 0
    for size in range(8, len(whole), 8):  # messages are padded to 8 bytes
        if stream:
            with contextlib.suppress(pyarrow.ArrowInvalid, OSError):
                list(pyarrow.ipc.open_stream(whole[:size]))
                taken_for_whole += 1
        cut.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"a\.arrow"):
            open_inputs([str(cut)])
    assert taken_for_whole == (3 if stream else 0)  # by Arrow: after the schema, and after each batch


def test_a_data_set_whose_file_is_truncated_between_batches_is_refused(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "set")
    (file,) = (tmp_path / "set").glob("*.arrow")
    check_stream_end(file)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(DataError, match="truncated: an Arrow stream without its end"):
        open_inputs([f"hf:{tmp_path / 'set'}"])


def test_offsets_outside_of_a_column_are_damage(tmp_path):
    path = write(tmp_path / "a.arrow", ["a" * 8] * 20, stream=False)
    content = path.read_bytes()
    offsets = b"".join((8 * i).to_bytes(4, "little") for i in range(21))
    place = content.index(offsets)
    path.write_bytes(content[: place + 8] + (1 << 30).to_bytes(4, "little") + content[place + 12 :])
    with pytest.raises(DataError, match=r"a\.arrow"):
        entries(path)


@pytest.mark.parametrize(("content", "found"), [(b"PAR1" + bytes(20), ".parquet files"), (b"FEA1" + bytes(20), "FEA1")])
def test_another_format_is_named(tmp_path, content, found):
    (tmp_path / "a.arrow").write_bytes(content)
    with pytest.raises(DataError, match=found):
        open_inputs([str(tmp_path / "a.arrow")])
