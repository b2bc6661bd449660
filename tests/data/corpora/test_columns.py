"""The same chats from every container: Arrow adds nulls to objects, and none of them may reach a template."""

import decimal
import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megatron_dmtd.chats.spans import render_with_spans
from megatron_dmtd.chats.template import ChatTemplates
from megatron_dmtd.data.corpora.columns import reader_of, values_of
from megatron_dmtd.data.corpora.documents import BadDocument, RecordKeys
from megatron_dmtd.data.corpora.sources import open_source
from megatron_dmtd.data.corpora.tokenizer import load_tokenizer
from tests.chats.records import RECORDS, assistant, call, user
from tests.chats.templates import QWEN3, unmarked
from tests.support.tokenizers import chat_tokenizer

CHATS = RecordKeys(messages="messages")
ROWS = [{**record, "tools": record.get("tools")} for record in RECORDS.values()]
NULLS = {
    "messages": [
        user("hi"),
        assistant(None, tool_calls=[call("search", {"query": None, "at": [None, 1]}), call("g", {"other": "x"})]),
    ],
    "tools": [],
}


@pytest.fixture(scope="module")
def templates(tmp_path_factory) -> ChatTemplates:
    tokenizer = load_tokenizer(chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), ["hi yes no"] * 3, vocab_size=270))
    tokenizer.chat_template = unmarked(QWEN3)
    return ChatTemplates(tokenizer)


def written(templates, name, **options):
    documents = list(open_source([str(name)], keys=CHATS, **options))
    return [render_with_spans(templates, document.chat) for document in documents]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "a.parquet")
    texts = [{key: json.dumps(value) for key, value in row.items()} for row in ROWS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(texts), folder / "texts.parquet")
    return folder


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "texts.parquet"])
def test_every_container_gives_the_same_texts_and_spans(templates, folder, name):
    found, wanted = written(templates, folder / name), written(templates, folder / "a.jsonl")
    for record, one, other in zip(RECORDS, found, wanted, strict=True):
        assert one == other, record


def test_arrow_has_added_nulls_so_the_case_has_occurred(folder):
    calls = [
        message["tool_calls"] or []
        for row in pyarrow.parquet.read_table(folder / "a.parquet").to_pylist()
        for message in row["messages"]
    ]
    arguments = [one["function"]["arguments"] for several in calls for one in several]
    assert {"city": "Paris", "query": None, "number": None} in arguments and {
        "city": None,
        "query": None,
        "number": None,
    } in arguments


@pytest.mark.parametrize("kind", ["whole columns", "calls", "on disk", "streamed"])
def test_what_datasets_writes_is_read_and_nulls_in_json_columns_are_kept(templates, tmp_path, kind, monkeypatch):
    import datasets

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [NULLS, *ROWS] if kind == "whole columns" else [*ROWS, NULLS]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if kind == "whole columns":
        features = datasets.Features({"messages": datasets.Json(), "tools": datasets.Json()})
    else:
        texts = {
            name: datasets.Value("string")
            for name in ("role", "content", "reasoning_content", "thinking", "name", "tool_call_id")
        }
        turns = datasets.List({**texts, "tool_calls": datasets.List(datasets.Json())})
        features = datasets.Features({"messages": turns, "tools": datasets.List(datasets.Json())})
    dataset = datasets.Dataset.from_list(rows, features=features)
    if kind == "on disk":
        dataset.save_to_disk(tmp_path / "saved")
        name = f"hf:{tmp_path / 'saved'}"
    else:
        path = tmp_path / "a.parquet"
        dataset.to_parquet(path)
        assert "arrow.json" in str(pyarrow.parquet.read_schema(path))
        name = f"hf:parquet?data_files={path}&streaming=1" if kind == "streamed" else str(path)
    found, wanted = written(templates, name), written(templates, tmp_path / "a.jsonl")
    assert found == wanted and any('{"query": null, "at": [null, 1]}' in text for text, _ in wanted)


def test_values_that_json_does_not_have_are_refused_by_row_and_place(tmp_path):
    rows = [{"messages": [assistant("", tool_calls=[call("f", {"price": decimal.Decimal("1.5")})])]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = open_source([str(tmp_path / "a.parquet")], keys=CHATS, skip_bad=True)
    assert list(source) == []
    (bad,) = source.skipped
    assert isinstance(bad, BadDocument) and bad.kind == "no chat"
    assert "row 1 of" in bad.found and "arguments.price is a Decimal (1.5), which JSON cannot hold" in bad.found


def test_every_nested_type_is_read():
    inner = pyarrow.struct([("a", pyarrow.string()), ("b", pyarrow.list_(pyarrow.struct([("c", pyarrow.int64())])))])
    value = {"a": None, "b": [{"c": None}, None, {"c": 1}]}
    plain = {"b": [{}, None, {"c": 1}]}
    for kind in (
        inner,
        pyarrow.list_(inner),
        pyarrow.large_list(inner),
        pyarrow.list_(inner, 2),
        pyarrow.map_(pyarrow.string(), inner),
    ):
        nested = value if kind == inner else {"k": value} if pyarrow.types.is_map(kind) else [value, None]
        wanted = plain if kind == inner else {"k": plain} if pyarrow.types.is_map(kind) else [plain, None]
        given = list(nested.items()) if pyarrow.types.is_map(kind) else nested
        assert values_of(pyarrow.array([given, None], type=kind)) == [wanted, None], kind
    assert reader_of(pyarrow.string()) is None and reader_of(pyarrow.list_(pyarrow.string())) is None
    column = pyarrow.array(['{"a": null}', None, "{bad"], type=pyarrow.json_())
    assert values_of(column) == [{"a": None}, None, "{bad"]
    assert values_of(pyarrow.array(["x", "y", "x"]).dictionary_encode()) == ["x", "y", "x"]
