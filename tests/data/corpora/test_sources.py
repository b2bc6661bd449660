"""Inputs by the names that users give."""

import pytest

from megatron_dmtd.data.corpora.documents import RecordKeys
from megatron_dmtd.data.corpora.sources import open_inputs, open_source
from megatron_dmtd.errors import DataError
from tests.data.corpora.texts import CONTENT, entries, write


def test_inputs_follow_each_other_in_the_order_given(folder, tmp_path):
    path = write(tmp_path, b'{"text": "one"}\n')
    source = open_source([str(path), str(folder)], skip_bad=True)
    assert [document.name for document in source] == ["a.jsonl:1", "b.txt", "sub/a.txt"]
    assert [bad.name for bad in source.skipped] == ["latin.txt"]
    assert source.description == f"key 'text' of a.jsonl; **/*.txt in {folder.name}"


def test_a_glob_pattern_is_its_files_in_order(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.jsonl.gz"):
        write(tmp_path, f'{{"text": "{name}"}}'.encode(), ".gz" if name.endswith("gz") else "", name=name.removesuffix(".gz"))
    assert [document.text for document in open_source([str(tmp_path / "*.jsonl*")])] == ["a.jsonl", "b.jsonl", "c.jsonl.gz"]
    with pytest.raises(DataError, match="no file that matches"):
        open_inputs([str(tmp_path / "*.parquet")])


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(tmp_path):
    path = write(tmp_path, b'{"text": "one"}', name="a[1].jsonl")
    assert len(open_inputs([str(path)])) == 1


@pytest.mark.parametrize("name", ["absent", "absent.jsonl", "absent.parquet"])
def test_an_absent_input_is_refused(tmp_path, name):
    with pytest.raises(DataError, match="no file or folder"):
        open_inputs([str(tmp_path / name)])


@pytest.mark.parametrize("name", ["b.txt", "b.parquet.gz", "b"])
def test_a_file_of_another_kind_is_refused(tmp_path, name):
    (tmp_path / name).write_text("text")
    with pytest.raises(DataError, match=rf"the file .*{name}"):
        open_inputs([str(tmp_path / name)])


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_an_empty_file_is_refused(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(DataError, match="is empty"):
        open_inputs([str(tmp_path / name)])


def test_a_folder_without_a_match_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"matches \*\*/\*\.txt"):
        open_inputs([str(tmp_path)])


def test_no_input_is_refused():
    with pytest.raises(DataError, match="no input"):
        open_inputs([])


def test_keys_are_carried_to_every_line(tmp_path):
    path = write(tmp_path, b'{"turns": [{"role": "user", "content": "hi"}]}\n')
    (chat,), _, _ = entries(path, keys=RecordKeys(messages="turns"))
    assert chat.chat.messages == [{"role": "user", "content": "hi"}]


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    import sys

    from megatron_dmtd.errors import CapabilityError

    path = write(tmp_path, CONTENT, ".zst")
    monkeypatch.setitem(sys.modules, "zstandard", None)  # as Python itself marks a module that cannot be imported
    with pytest.raises(CapabilityError, match="no package zstandard"):
        open_inputs([str(path)])
