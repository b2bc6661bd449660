"""Files with one JSON array."""

import hashlib
import json

import pytest

from megatron_dmtd.data.corpora.documents import BadDocument, Document, RecordKeys
from megatron_dmtd.data.corpora.inputs import BLOCK_BYTES
from megatron_dmtd.data.corpora.json_arrays import ArrayInput
from megatron_dmtd.errors import DataError
from tests.data.corpora.texts import PACKERS, entries, write

ITEMS = [{"text": f"item {i} é"} for i in range(1, 40)]


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("block_bytes", [64, BLOCK_BYTES])
@pytest.mark.parametrize("indent", [None, 2])
def test_items_have_the_same_names_and_texts_however_they_are_packed_and_cut(tmp_path, suffix, block_bytes, indent):
    path = write(tmp_path, json.dumps(ITEMS, indent=indent).encode("utf-8-sig"), suffix, name="a.json")
    documents, blocks, one = entries(path, block_bytes=block_bytes)
    assert documents == [Document(name=f"{path.name}:{i}", text=f"item {i} é") for i in range(1, 40)]
    assert len(blocks) > 1 or block_bytes == BLOCK_BYTES
    assert one.sha256 == hashlib.sha256(path.read_bytes()).hexdigest() and one.num_bytes == path.stat().st_size


def test_one_bad_item_is_one_bad_document(tmp_path):
    path = write(tmp_path, b'[{"text": "one"}, "two", {"text": 3}, {"text": "four"}]', name="a.json")
    one, two, three, four = entries(path)[0]
    assert (one.text, four.text) == ("one", "four")
    assert isinstance(two, BadDocument) and (two.kind, two.found) == ("not JSON", f"item 2 of {path}: str")
    assert isinstance(three, BadDocument) and (three.kind, three.name) == ("not a string", "a.json:3")


@pytest.mark.parametrize("cut", [b'[{"text": "one"}, {"te', b'[{"text": "one"}] x', b'[{"text": "\xff"}]'])
def test_an_array_that_is_not_whole_is_refused(tmp_path, cut):
    with pytest.raises(DataError, match=r"a\.json: .*\n.*one whole JSON array"):
        entries(write(tmp_path, cut, name="a.json"))


def test_a_truncated_compressed_array_is_refused(tmp_path):
    path = write(tmp_path, json.dumps(ITEMS).encode(), ".gz", name="a.json")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="truncated"):
        entries(path)


def test_an_array_too_large_for_memory_is_refused_with_the_way_out(tmp_path):
    path = write(tmp_path, json.dumps(ITEMS).encode(), name="a.json")
    with pytest.raises(DataError, match=r"jq -c '\.\[\]' a\.json > a\.jsonl"):
        list(ArrayInput(path, RecordKeys(), largest=100).blocks(BLOCK_BYTES))
