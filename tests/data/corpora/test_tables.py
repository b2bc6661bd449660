"""Parquet files and data sets of the `datasets` library."""

import hashlib
import json

import pyarrow
import pyarrow.parquet
import pytest

from megatron_dmtd.data.corpora.documents import BadDocument, Document, RecordKeys
from megatron_dmtd.data.corpora.sources import open_inputs
from megatron_dmtd.errors import DataError

TEXTS = [f"row {i} é" for i in range(1, 701)]


def write_parquet(path, values, *, column="text", row_group_size=100):
    pyarrow.parquet.write_table(
        pyarrow.table({column: values, "id": list(range(len(values)))}), path, row_group_size=row_group_size
    )
    return path


def entries(name, *, keys=None, block_bytes=1000):
    (one,) = open_inputs([str(name)], keys=keys)
    blocks = list(one.blocks(block_bytes))
    return [entry for block in blocks for entry in block.entries()], blocks, one


def test_rows_of_parquet_are_documents_named_by_their_row(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", TEXTS)
    documents, blocks, one = entries(path)
    assert documents == [Document(name=f"a.parquet:{i}", text=text) for i, text in enumerate(TEXTS, start=1)]
    assert len(blocks) > 5 and abs(sum(block.num_bytes for block in blocks) - one.num_bytes) < len(blocks)
    assert one.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_nulls_and_other_types_in_parquet_are_bad(tmp_path):
    one, bad = entries(write_parquet(tmp_path / "a.parquet", ["one", None]))[0]
    assert one.text == "one"
    assert isinstance(bad, BadDocument) and bad.kind == "not a string" and "row 2 of" in bad.found
    (number,), _, _ = entries(write_parquet(tmp_path / "b.parquet", [7]))
    assert number.kind == "not a string"


def test_chats_in_parquet_are_chats(tmp_path):
    turns = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]]
    (chat,), _, _ = entries(write_parquet(tmp_path / "a.parquet", turns, column="turns"), keys=RecordKeys(messages="turns"))
    assert chat.chat.messages == turns[0]


RAW = [b"one", b"b\xe9d", None, "zwölf, long enough for a view".encode(), b"\xff"]


def faulty_column(kind):
    """The same values, of which two are not UTF-8, as a column of each type that can hold a text."""
    raw = pyarrow.array(RAW, pyarrow.large_binary() if kind == "large_string" else pyarrow.binary())
    unchecked = {"string": pyarrow.string(), "large_string": pyarrow.large_string(), "dictionary": pyarrow.string()}
    if kind in unchecked:
        raw = pyarrow.Array.from_buffers(unchecked[kind], len(raw), raw.buffers())
    if kind == "dictionary":
        return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0, 1, None, 2, 3], pyarrow.int32()), raw.drop_null())
    return raw.cast(pyarrow.binary_view()) if kind == "binary_view" else raw


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary", "binary", "binary_view"])
@pytest.mark.parametrize("container", ["parquet", "arrow"])
def test_one_bad_row_is_one_bad_document(tmp_path, kind, container):
    path = tmp_path / f"a.{container}"
    table = pyarrow.table({"text": pyarrow.chunked_array([faulty_column(kind)] * 2)})
    if container == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=3)
    else:
        with pyarrow.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    one, bad, null, four, *_ = found = entries(path)[0]
    assert one.text == "one" and four.text == RAW[3].decode()
    assert isinstance(bad, BadDocument) and bad.kind == "not UTF-8" and bad.name == f"a.{container}:2"
    assert f"row 2 of {path}, column 'text': 'utf-8' codec can't decode byte 0xe9 in position 1" in bad.found
    assert null.kind == "not a string"
    assert [isinstance(entry, Document) for entry in found] == [True, False, False, True, False] * 2


@pytest.mark.parametrize("streaming", ["0", "1"])
def test_one_bad_row_of_a_data_set_is_one_bad_document(tmp_path, streaming, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    pyarrow.parquet.write_table(pyarrow.table({"text": faulty_column("string")}), tmp_path / "a.parquet")
    one, bad, *_ = entries(f"hf:parquet?data_files={tmp_path / 'a.parquet'}&streaming={streaming}")[0]
    assert one.text == "one" and bad.kind == "not UTF-8" and "row 2 of hf:parquet" in bad.found


def test_values_that_python_cannot_hold_are_bad_rows(tmp_path):
    days = pyarrow.array([0, 2**30], pyarrow.date32())
    first, second = entries(write_parquet(tmp_path / "a.parquet", days))[0]
    assert (first.kind, second.kind) == ("not a string", "unreadable value")
    assert "row 2 of" in second.found and "a value of the type date32[day]: days=1073741824" in second.found
    kind = pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.binary())]))
    turns = pyarrow.array([[{"role": "user", "content": content}] for content in (b"hi", b"\xe9", None)], kind)
    path = write_parquet(tmp_path / "b.parquet", turns, column="turns")
    good, bad, _ = entries(path, keys=RecordKeys(messages="turns"))[0]
    assert good.chat.messages == [{"role": "user", "content": "hi"}] and bad.kind == "not UTF-8"


def test_views_and_a_column_that_is_there_twice(tmp_path):
    views = pyarrow.array(TEXTS, pyarrow.string_view())
    assert [entry.text for entry in entries(write_parquet(tmp_path / "a.parquet", views))[0]] == TEXTS
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(twice, tmp_path / "b.parquet")
    with pytest.raises(DataError, match="one column 'text'"):
        open_inputs([str(tmp_path / "b.parquet")])


def test_a_parquet_file_without_the_column_is_refused_at_the_opening(tmp_path):
    with pytest.raises(DataError, match=r"columns \['content', 'id'\]"):
        open_inputs([str(write_parquet(tmp_path / "a.parquet", TEXTS, column="content"))])


def test_a_damaged_parquet_file_is_refused(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", TEXTS)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(DataError, match=r"a\.parquet"):
        open_inputs([str(path)])
    path.write_bytes(whole[:40] + bytes(400) + whole[440:])  # the footer is whole, pages are not
    with pytest.raises(DataError, match=r"row 1 of .*a\.parquet, or a later one"):
        entries(path)


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    path = tmp_path_factory.mktemp("hub") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:300]))
    return path


@pytest.mark.parametrize("streaming", ["0", "1"])
def test_a_data_set_that_datasets_loads_or_streams_is_an_input(tmp_path, lines, streaming, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    documents, blocks, one = entries(f"hf:json?data_files={lines}&streaming={streaming}")
    assert [document.text for document in documents] == TEXTS[:300]
    assert documents[0].name == "json:1" and len(blocks) > 2
    assert one.num_bytes == 0 and len(one.sha256) == 64
    again, _, _ = entries(f"hf:json?data_files={lines}&streaming={streaming}", block_bytes=10)
    assert again == documents


def test_a_data_set_on_disk_is_an_input(tmp_path):
    import datasets

    dataset = datasets.Dataset.from_dict({"content": TEXTS[:10]})
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"test": dataset}).save_to_disk(tmp_path / "several")
    keys = RecordKeys(text="content")
    assert [document.text for document in entries(f"hf:{tmp_path / 'one'}", keys=keys)[0]] == TEXTS[:10]
    assert [document.text for document in entries(f"hf:{tmp_path / 'several'}?split=test", keys=keys)[0]] == TEXTS[:10]
    with pytest.raises(DataError, match="KeyError"):
        open_inputs([f"hf:{tmp_path / 'several'}?split=train"], keys=keys)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("hf:json?data_files={lines}&split=none", "ValueError"),
        ("hf:{lines}/absent", "hf:"),
        ("hf:json?data_files={lines}&color=red", r"options \['color'\]"),
    ],
)
def test_a_data_set_that_cannot_be_opened_is_refused(tmp_path, lines, name, found, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=found):
        open_inputs([name.format(lines=lines)])


def test_a_data_set_without_the_column_is_refused(tmp_path, lines, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=r"columns \['text'\]"):
        open_inputs([f"hf:json?data_files={lines}"], keys=RecordKeys(text="content"))
    with pytest.raises(DataError, match=r"columns \['text'\]"):  # a stream may know its columns only when it is read
        entries(f"hf:json?data_files={lines}&streaming=1", keys=RecordKeys(text="content"))


def test_a_stream_that_breaks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n' * 10 + "{\n")
    with pytest.raises(DataError, match=r"bad\.jsonl"):
        entries(f"hf:json?data_files={tmp_path / 'bad.jsonl'}&streaming=1")
