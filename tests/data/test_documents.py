import os

import pytest

from megatron_dmtd.data.documents import Document, folder_documents, in_split, is_heldout, open_source, stdlib_documents
from megatron_dmtd.errors import DataError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes("zwei\r\nLinien é".encode())
    (tmp_path / "sub" / "a.txt").write_text("one")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "other.md").write_text("# not asked for")
    return tmp_path


def write_jsonl(path, lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def test_files_of_a_folder_come_in_the_order_of_their_paths_and_byte_for_byte(folder):
    source = folder_documents(folder, patterns=["**/*.txt"])
    assert list(source) == [Document(name="b.txt", text="zwei\r\nLinien é"), Document(name="sub/a.txt", text="one")]


def test_files_that_are_not_utf8_are_left_out_by_name_in_every_pass(folder):
    source = folder_documents(folder, patterns=["**/*.txt"])
    assert source.names == ["b.txt", "latin.txt", "sub/a.txt"]
    for _ in range(2):
        assert len(list(source)) == 2
        assert source.skipped == ["latin.txt"]


def test_a_file_that_two_patterns_match_is_one_document(folder):
    assert [document.name for document in folder_documents(folder, patterns=["*.md", "other.*"])] == ["other.md"]


def test_lines_of_jsonl_are_documents_named_by_their_line(tmp_path):
    path = write_jsonl(
        tmp_path / "a.jsonl", ['{"text": "one\\u2028"}', "", '{"text": "", "id": 7}', '{"id": 8, "text": "\\ud800"}']
    )
    source = open_source([path])
    assert list(source) == [Document(name="a.jsonl:1", text="one\u2028"), Document(name="a.jsonl:3", text="")]
    assert source.skipped == ["a.jsonl:4"]  # half a surrogate pair


def test_the_text_of_a_line_may_have_another_key(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ['{"content": "one"}'])
    assert [document.text for document in open_source([path], text_key="content")] == ["one"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("{", "line 2 of .*a.jsonl: Expecting"),
        ('{"id": 1}', r"keys \['id'\]"),
        ('{"text": null}', r"keys \['text'\]"),
        ("[1]", "list"),
    ],
)
def test_a_line_without_text_is_refused_by_its_number(tmp_path, line, found):
    path = write_jsonl(tmp_path / "a.jsonl", ['{"text": "one"}', line])
    with pytest.raises(DataError, match=found):
        list(open_source([path]))


def test_inputs_follow_each_other_in_the_order_given(folder, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ['{"text": "one"}'])
    source = open_source([path, str(folder)])
    assert [document.name for document in source] == ["a.jsonl:1", "b.txt", "sub/a.txt"]
    assert source.skipped == ["latin.txt"]
    assert source.description == f"key 'text' of a.jsonl; **/*.txt in {folder.name}"


def test_the_standard_library_is_a_corpus_without_installed_packages():
    source = stdlib_documents()
    names = source.names
    assert names == sorted(names)
    assert len(names) > 500 and "asyncio/base_events.py" in names
    assert not any("site-packages" in name for name in names)
    assert next(iter(open_source(["stdlib"]))).name == names[0]


@pytest.mark.parametrize("name", ["absent", "absent.jsonl"])
def test_an_absent_input_is_refused(tmp_path, name):
    with pytest.raises(DataError, match="no file or folder"):
        open_source([str(tmp_path / name)])


def test_a_file_of_another_kind_is_refused(folder):
    with pytest.raises(DataError, match=r"the file .*b\.txt"):
        open_source([str(folder / "b.txt")])


def test_an_empty_jsonl_file_is_refused(tmp_path):
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(DataError, match="is empty"):
        open_source([str(tmp_path / "a.jsonl")])


def test_a_folder_without_a_match_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"matches \*\*/\*\.txt"):
        open_source([str(tmp_path)])


def test_no_input_is_refused():
    with pytest.raises(DataError, match="no input"):
        open_source([])


NAMES = [f"lib/module_{i}.py" for i in range(4000)]


def test_train_and_heldout_are_disjoint_and_together_all():
    train = {name for name in NAMES if in_split(name, "train", 0.02)}
    heldout = {name for name in NAMES if in_split(name, "heldout", 0.02)}
    assert not train & heldout
    assert train | heldout == {name for name in NAMES if in_split(name, "all", 0.02)} == set(NAMES)
    assert 40 < len(heldout) < 120  # 80 expected


def test_the_split_of_a_name_never_changes():
    assert [name for name in NAMES[:100] if is_heldout(name, 0.05)] == [f"lib/module_{i}.py" for i in (36, 50, 63, 85, 92, 96)]


def test_a_larger_fraction_holds_out_a_superset_and_zero_nothing():
    small, large = ({name for name in NAMES if is_heldout(name, fraction)} for fraction in (0.02, 0.1))
    assert small < large
    assert not any(is_heldout(name, 0.0) for name in NAMES)


def test_a_name_that_is_not_utf8_has_a_split():
    name = os.fsdecode(b"\xff.txt")
    assert is_heldout(name, 1 - 1e-9) and not is_heldout(name, 1e-9)
