"""Files that are not what their names say, before a document of them is read."""

import json

import pytest

from megatron_dmtd.data.corpora.formats import format_of, layout_of, other_encoding
from megatron_dmtd.data.corpora.sources import open_inputs
from megatron_dmtd.errors import DataError
from tests.data.corpora.texts import COMPRESSED, PACKERS, write

LINE = b'{"text": "one"}\n'


@pytest.mark.parametrize("suffix", PACKERS)
def test_the_first_bytes_tell_the_format(suffix):
    assert format_of(PACKERS[suffix](LINE)) == suffix
    assert format_of(PACKERS[suffix](b"")) == suffix


def test_frames_that_decoders_skip_are_zstandards():
    assert [format_of(number.to_bytes(4, "little")) for number in (0x184D2A4F, 0x184D2A50, 0x184D2A5F, 0x184D2A60)] == [
        "",
        ".zst",
        ".zst",
        "",
    ]


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_a_file_with_the_name_of_another_format_is_refused_with_the_name_that_it_should_have(tmp_path, suffix):
    path = tmp_path / "a.jsonl"
    path.write_bytes(PACKERS[suffix](LINE))
    with pytest.raises(DataError, match=rf"holds the format of \{suffix} files.*\n.*ends in \{suffix}"):
        open_inputs([str(path)])
    plain = tmp_path / f"a.jsonl{suffix}"
    plain.write_bytes(LINE)
    with pytest.raises(DataError, match=rf"begins with .*\n.*a \{suffix} file"):
        open_inputs([str(plain)])


def test_a_parquet_file_is_one_under_each_name_or_refused(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one"]}), table)
    (tmp_path / "a.jsonl").write_bytes(table.read_bytes())
    (tmp_path / "b.parquet").write_bytes(LINE)
    for name, words in (("a.jsonl", r"holds the format of \.parquet"), ("b.parquet", r"a \.parquet file")):
        with pytest.raises(DataError, match=words):
            open_inputs([str(tmp_path / name)])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_another_encoding_is_named(tmp_path, encoding):
    path = write(tmp_path, LINE.decode().encode(encoding))
    assert other_encoding(path.read_bytes()).lower().replace("-", "") in encoding.replace("-", "")
    with pytest.raises(DataError, match=r"in UTF-(16|32)(LE|BE)?\n.*UTF-8\n.*iconv"):
        open_inputs([str(path)])


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize(
    ("name", "content", "layout"),
    [
        ("a.jsonl", LINE, "lines"),
        ("a.jsonl", b"\n\n" + LINE, "lines"),
        ("a.jsonl", b"[1, 2]\n[3]\n", "lines"),
        ("a.jsonl", b"[" + LINE.strip() + b", 3]\n", "array"),
        ("a.jsonl", b"{bad\n" + LINE, "lines"),
        ("a.jsonl", LINE.strip() + b"\r\n", "lines"),
        ("a.jsonl", b"[\n" + LINE.strip() + b"\n]", "array"),
        ("a.jsonl", b"[" + LINE.strip() + b",\n" + LINE.strip() + b"]", "array"),
        ("a.json", LINE + LINE, "lines"),
        ("a.json", b"[" + LINE.strip() + b"]", "array"),
        ("a.json", b"\xef\xbb\xbf [\n" + LINE.strip() + b"]", "array"),
        ("a.json", json.dumps({"text": "x" * 200_000}).encode(), "lines"),
    ],
)
def test_lines_and_arrays(tmp_path, suffix, name, content, layout):
    assert layout_of(write(tmp_path, content, suffix, name=name)) == layout


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize(
    ("content", "found"),
    [
        (LINE.strip() + b"\r" + LINE.strip() + b"\r", "whose lines end in CR alone"),
        ((LINE.strip() + b"\r") * 20_000, "whose lines end in CR alone"),
        (LINE.strip() * 2, "several JSON values on one line"),
        (LINE.strip() * 20_000, "several JSON values on one line"),
        (b"{" + LINE, "one line, which is not JSON"),
        (bytes(1000), "one line, which is not JSON"),
        (b'"text"\n\n', "a single JSON str"),
    ],
)
def test_a_whole_file_is_never_one_bad_document(tmp_path, suffix, content, found):
    with pytest.raises(DataError, match=found):
        open_inputs([str(write(tmp_path, content, suffix))])


def test_an_object_over_several_lines_is_refused(tmp_path):
    path = write(tmp_path, json.dumps({"text": "one"}, indent=1).encode())
    with pytest.raises(DataError, match="object over several lines"):
        open_inputs([str(path)])
