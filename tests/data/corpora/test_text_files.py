"""Inputs of text: which documents they hold, under which names, and that their blocks join without a seam."""

import hashlib
import json

import pytest

from megatron_dmtd.data.corpora.documents import BadDocument, Document
from megatron_dmtd.data.corpora.inputs import BLOCK_BYTES
from megatron_dmtd.data.corpora.sources import open_inputs, open_source
from megatron_dmtd.data.corpora.text_files import folder_input, stdlib_input
from megatron_dmtd.errors import DataError
from tests.data.corpora.texts import COMPRESSED, CONTENT, PACKERS, entries, write


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("block_bytes", [64, 300, BLOCK_BYTES])
def test_lines_have_the_same_names_and_texts_however_they_are_packed_and_cut(tmp_path, suffix, block_bytes):
    path = write(tmp_path, CONTENT, suffix)
    documents, blocks, one = entries(path, block_bytes=block_bytes)
    numbers = [*range(1, 31), *range(33, 62)]
    assert documents == [Document(name=f"{path.name}:{n}", text=f"line {i} é") for i, n in enumerate(numbers, start=1)]
    assert len(blocks) == 1 if block_bytes == BLOCK_BYTES else len(blocks) > 1 or suffix
    assert one.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert sum(block.num_bytes for block in blocks) == one.num_bytes == path.stat().st_size


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_several_compressed_streams_in_one_file_are_one_content(tmp_path, suffix):
    pack = PACKERS[suffix]
    path = tmp_path / f"a.jsonl{suffix}"
    half = CONTENT.index(b"\n", len(CONTENT) // 2) - 5
    path.write_bytes(pack(CONTENT[:half]) + pack(CONTENT[half:]) + bytes(0 if suffix == ".zst" else 100))
    documents, _, _ = entries(path)
    assert len(documents) == 59 and all(isinstance(document, Document) for document in documents)


@pytest.mark.parametrize("suffix", COMPRESSED)
@pytest.mark.parametrize("block_bytes", [64, BLOCK_BYTES])
def test_a_truncated_file_yields_its_whole_lines_and_then_the_damage_by_line(tmp_path, suffix, block_bytes):
    import random

    generator = random.Random(0)  # incompressible, so that a cut leaves many whole lines
    lines = [json.dumps({"text": generator.randbytes(40).hex()}) for _ in range(4000)]
    path = write(tmp_path, "\n".join(lines).encode(), suffix)
    path.write_bytes(path.read_bytes()[:-60_000])
    *documents, bad = entries(path, block_bytes=block_bytes)[0]
    assert len(documents) > 500
    assert [document.text for document in documents] == [json.loads(line)["text"] for line in lines[: len(documents)]]
    assert isinstance(bad, BadDocument) and bad.kind == "damaged file"
    assert f"line {len(documents) + 1} of {path}: truncated" in bad.found
    with pytest.raises(DataError, match="truncated"):
        list(open_source([str(path)]))
    source = open_source([str(path)], skip_bad=True)
    assert len(list(source)) == len(documents) and source.skipped == [bad]


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_a_file_whose_damage_leaves_no_line_is_refused_and_never_one_bad_document(tmp_path, suffix):
    path = write(tmp_path, CONTENT, suffix)
    path.write_bytes(path.read_bytes()[:12])
    with pytest.raises(DataError, match=r"line 1 of .*(damaged|truncated)"):
        list(open_source([str(path)], skip_bad=True))


def test_byte_order_marks_are_no_text_wherever_files_were_joined(tmp_path, folder):
    mark = b"\xef\xbb\xbf"
    path = write(tmp_path, mark + b'{"text": "one"}\r\n' + mark + b'{"text": "two"}')
    assert [document.text for document in entries(path)[0]] == ["one", "two"]
    (folder / "b.txt").write_bytes(mark + b"one")
    (folder / "latin.txt").write_bytes("zwei".encode("utf-16"))
    first, bad, _ = [entry for block in folder_input(folder, patterns=["**/*.txt"]).blocks(1) for entry in block.entries()]
    assert first.text == "one" and bad.found == f"line 1 of {folder / 'latin.txt'}: UTF-16"


def test_a_compressed_file_in_a_folder_of_texts_is_refused(folder):
    (folder / "b.txt").write_bytes(PACKERS[".gz"](b"one"))
    with pytest.raises(DataError, match=r"b\.txt, which holds the format of \.gz files"):
        list(open_source([str(folder)], skip_bad=True))


def test_a_bad_line_between_good_ones_keeps_its_place(tmp_path):
    path = write(tmp_path, b'{"text": "one"}\n{\n{"text": "two"}\n')
    one, bad, two = entries(path)[0]
    assert (one.text, bad.name, two.text) == ("one", "a.jsonl:2", "two")


def test_files_of_a_folder_come_in_the_order_of_their_paths_and_byte_for_byte(folder):
    one = folder_input(folder, patterns=["**/*.txt"])
    assert one.names == ["b.txt", "latin.txt", "sub/a.txt"]
    first, bad, last = [entry for block in one.blocks(1) for entry in block.entries()]
    assert (first, last) == (Document(name="b.txt", text="zwei\r\nLinien é"), Document(name="sub/a.txt", text="one"))
    assert bad.kind == "not UTF-8" and f"line 2 of {folder / 'latin.txt'}" in bad.found
    listing = "".join(f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in one.names)
    assert one.sha256 == hashlib.sha256(listing.encode()).hexdigest()


def test_a_file_that_two_patterns_match_is_one_document(folder):
    assert folder_input(folder, patterns=["*.md", "other.*"]).names == ["other.md"]


def test_an_empty_file_is_a_bad_document(folder):
    (folder / "empty.md").touch()
    one = folder_input(folder, patterns=["empty.md"])
    (bad,) = [entry for block in one.blocks(BLOCK_BYTES) for entry in block.entries()]
    assert (bad.kind, bad.name) == ("empty", "empty.md")


def test_the_standard_library_is_a_corpus_of_texts_without_installed_packages():
    one = stdlib_input()
    assert one.names == sorted(one.names)
    assert len(one.names) > 500 and "asyncio/base_events.py" in one.names
    assert not any("site-packages" in name for name in one.names)
    assert all(isinstance(entry, Document) for block in one.blocks(BLOCK_BYTES) for entry in block.entries())
    (same,) = open_inputs(["stdlib"])
    assert same.identity() == one.identity()


def test_a_text_may_begin_with_the_letters_of_another_format(tmp_path):
    texts = {"a.txt": "BZh is a name", "b.txt": "PAR1 is a gene, and ARROW1\0 a word", "c.txt": "PAR1 is a gene"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (one,) = open_inputs([str(tmp_path)], patterns=["a.txt", "c.txt"])
    assert [entry.text for block in one.blocks(1000) for entry in block.entries()] == [texts["a.txt"], texts["c.txt"]]
    (other,) = open_inputs([str(tmp_path)], patterns=["b.txt"])
    with pytest.raises(DataError, match=r"b\.txt, which holds the format of \.parquet files"):  # no text has a NUL there
        list(next(iter(other.blocks(1000))).entries())
