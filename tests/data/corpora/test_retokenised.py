"""Token files against the reference tokenizer: planted differences are found, and nothing else."""

import json

import numpy as np
import pytest

from megatron_dmtd.data.batches.token_file import TokenFile
from megatron_dmtd.data.corpora.documents import RecordKeys
from megatron_dmtd.data.corpora.preprocess import PreprocessOptions, preprocess
from megatron_dmtd.data.corpora.retokenised import Retokenised, retokenise
from megatron_dmtd.data.corpora.sources import open_inputs
from megatron_dmtd.data.corpora.tokenizer import load_tokenizer
from megatron_dmtd.errors import DataError
from tests.chats.records import RECORDS
from tests.support.tokenizers import chat_tokenizer

TEXTS = [f"the cat's {nth} é\u088f's <|mask|> <|im_end|> 👩‍👧\n" for nth in range(40)]


def write_lines(path, values, key="text"):
    path.write_text("".join(json.dumps({key: value}) + "\n" for value in values))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), ["the cat's mat's hi yes no"] * 4, vocab_size=290)


@pytest.fixture
def prefix(tmp_path, folder) -> str:
    inputs = open_inputs([str(write_lines(tmp_path / "a.jsonl", TEXTS))])
    preprocess(inputs, PreprocessOptions(tokenizer_dir=folder, output_prefix=str(tmp_path / "c"), num_workers=1))
    return str(tmp_path / "c")


def planted(prefix, document, change):
    """The same file with another id somewhere in a document."""
    tokens = np.memmap(prefix + ".bin", dtype=np.uint16, mode="r+")
    begin = int(TokenFile(prefix).lengths(0, document).sum())
    length = int(TokenFile(prefix).lengths(document, document + 1)[0])
    change(tokens[begin : begin + length])
    tokens.flush()


def test_all_ids_of_texts_are_those_of_the_reference(prefix, folder):
    assert retokenise(prefix, folder, num_documents=1000) == Retokenised(
        num_documents=40, num_tokens=TokenFile(prefix).num_tokens
    )
    assert retokenise(prefix, folder, num_documents=5).num_documents == 5


def test_chats_are_compared_with_their_special_tokens(tmp_path, folder):
    keys = RecordKeys(messages="messages")
    chats = [RECORDS[name]["messages"] for name in ("one turn", "several turns", "words of the template", "accents and hands")]
    inputs = open_inputs([str(write_lines(tmp_path / "a.jsonl", chats, "messages"))], keys=keys)
    preprocess(inputs, PreprocessOptions(tokenizer_dir=folder, output_prefix=str(tmp_path / "c"), num_workers=1, keys=keys))
    assert retokenise(str(tmp_path / "c"), folder, num_documents=10).num_documents == 4


def test_a_word_that_is_cut_elsewhere_is_found(prefix, folder):
    tokenizer = load_tokenizer(folder)
    merged, first, second = tokenizer.convert_tokens_to_ids(["'s", "'", "s"])
    assert merged != tokenizer.unk_token_id, "no token for the planted fault"

    def swap(ids_N):  # `'s` of another document's length cannot be had, so two ids make way for one
        at = int(np.flatnonzero(ids_N == merged)[0])
        ids_N[at : at + 2] = first, second

    planted(prefix, 7, swap)
    planted(prefix, 9, swap)
    with pytest.raises(DataError, match=r"2 of 40 documents with other ids: document 7, token \d+: \[\"'\", 's'") as refused:
        retokenise(prefix, folder, num_documents=1000)
    assert "document 9, token" in str(refused.value) and 'instead of ["\'s"' in str(refused.value)


def test_a_tokenizer_that_loses_text_says_why_nothing_is_compared(prefix, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_dmtd.data.corpora.retokenised._is_of_bytes", lambda _: False)
    found = retokenise(prefix, folder, num_documents=10)
    assert found.num_documents == 0 and "does not decode to the very text" in found.reason
