"""One block of documents to arrays: ids and EOS, splits, loss marks, and documents that may not be written."""

import dataclasses
import pickle
import shutil

import numpy as np
import pytest

from megatron_dmtd.chats.template import ChatTemplates
from megatron_dmtd.chats.turns import Chat
from megatron_dmtd.data.corpora.documents import BadDocument, Document, is_heldout
from megatron_dmtd.data.corpora.encoding import BlockEncoder, EncodingJob, sample_texts
from megatron_dmtd.data.corpora.inputs import EntriesBlock
from megatron_dmtd.data.corpora.tokenizer import control_ids, encoder_json, load_tokenizer, vocabulary_size
from tests.support.tokenizers import chat_tokenizer

TEXTS = ["the cat sat", "on the mat", "a <|mask|> is text", "é"]
CHAT = [{"role": "user", "content": "cat"}, {"role": "assistant", "content": "sat"}, {"role": "user", "content": "mat"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEXTS, vocab_size=290)


@pytest.fixture
def job(folder):
    def make(*, chats=False, **changes):
        tokenizer = load_tokenizer(folder)
        control = control_ids(tokenizer)
        text = encoder_json(tokenizer, control, chats=chats)
        fields = {
            "tokenizer_dir": folder,
            "tokenizer_json": text,
            "encoder": "tokenizers",
            "fast_model": None,
            "control": control,
            "vocab_size": vocabulary_size(text, control),
            "chats": chats,
            "assistant_loss": False,
            "bos": None,
            "heldout_fraction": 0.0,
            "dtype": np.uint16,
        }
        return pickle.loads(pickle.dumps(EncodingJob(**fields | changes)))  # as it travels to a worker

    return make


def block_of(texts, num_bytes=7):
    return EntriesBlock(
        documents=tuple(Document(name=f"a:{nth}", text=text) for nth, text in enumerate(texts)), num_bytes=num_bytes
    )


def documents_of(part):
    ends = np.cumsum(part.lengths_U)
    return [part.tokens_N[begin:end].tolist() for begin, end in zip(ends - part.lengths_U, ends)]


def test_each_text_is_its_ids_and_eos(folder, job):
    made = BlockEncoder(job())(block_of(TEXTS))
    part, tokenizer = made.splits["all"], load_tokenizer(folder)
    assert [tokenizer.decode(ids[:-1]) for ids in documents_of(part)] == TEXTS
    assert all(ids[-1] == tokenizer.eos_token_id and 2 not in ids for ids in documents_of(part))
    assert part.tokens_N.dtype == np.uint16 and part.lengths_U.dtype == np.int32 and part.loss_N is None
    assert part.max_token_id == part.tokens_N.max()
    assert (made.num_documents, made.num_tokens, made.num_bytes, made.bad) == (4, part.tokens_N.size, 7, [])


def test_a_block_without_documents_is_empty_arrays(job):
    part = BlockEncoder(job())(EntriesBlock(documents=())).splits["all"]
    assert part.tokens_N.size == part.lengths_U.size == part.max_token_id == 0


def test_splits_are_disjoint_and_together_all(job):
    texts = [f"cat {nth}" for nth in range(40)]
    whole = documents_of(BlockEncoder(job())(block_of(texts)).splits["all"])
    splits = BlockEncoder(job(heldout_fraction=0.3))(block_of(texts)).splits
    heldout = [ids for nth, ids in enumerate(whole) if is_heldout(f"a:{nth}", 0.3)]
    train = [ids for nth, ids in enumerate(whole) if not is_heldout(f"a:{nth}", 0.3)]
    assert documents_of(splits["heldout"]) == heldout and documents_of(splits["train"]) == train
    assert 5 < len(heldout) < 20


def test_bad_documents_are_handed_back_and_a_document_with_a_control_id_is_one(job):
    bad = BadDocument(name="b", kind="empty", found="b: an empty document", required="text")
    entries = (Document(name="a", text="cat"), bad, Document(name="c", text="mat"))
    encoder = BlockEncoder(job())
    cat, mat = (documents_of(encoder(block_of([text])).splits["all"])[0] for text in ("cat", "mat"))
    made = encoder(EntriesBlock(documents=entries))
    assert made.bad == [bad] and documents_of(made.splits["all"]) == [cat, mat]
    # an ordinary token as MASK: every text that spells it is refused
    plain = job()
    ordinary = dataclasses.replace(plain, control=dataclasses.replace(plain.control, mask=mat[0]))
    made = BlockEncoder(ordinary)(EntriesBlock(documents=entries))
    assert [(one.name, one.kind) for one in made.bad] == [("b", "empty"), ("c", "control token")]
    assert f"the control id {mat[0]} from the text 'mat'" in made.bad[1].found
    assert documents_of(made.splits["all"]) == [cat]


def test_chats_are_what_the_template_writes_and_the_assistants_tokens_are_marked(folder, job):
    block = EntriesBlock(
        documents=(Document(name="a", chat=Chat(messages=CHAT)), Document(name="b", chat=Chat(messages=CHAT[:1])))
    )
    plain = BlockEncoder(job(chats=True))(block).splits["all"]
    marked = BlockEncoder(job(chats=True, assistant_loss=True))(block).splits["all"]
    tokenizer = load_tokenizer(folder)
    for ids, chat in zip(documents_of(plain), (CHAT, CHAT[:1])):
        assert ids == tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
    assert np.array_equal(plain.tokens_N, marked.tokens_N) and plain.loss_N is None
    assert tokenizer.decode(marked.tokens_N[marked.loss_N == 1]) == "sat<|im_end|>"


def test_a_chat_that_the_template_refuses_is_bad(folder, job, tmp_path):
    shutil.copytree(folder, tmp_path / "strict")
    (tmp_path / "strict" / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}")
    block = EntriesBlock(documents=(Document(name="a", chat=Chat(messages=CHAT)),))
    made = BlockEncoder(job(chats=True, tokenizer_dir=str(tmp_path / "strict")))(block)
    assert made.num_documents == 0
    assert [(one.name, one.kind) for one in made.bad] == [("a", "no chat")] and "no such role" in made.bad[0].found


def test_texts_to_choose_an_encoder_by_are_the_first_and_not_too_many(folder):
    blocks = [block_of(["abc", "defg"]), block_of(["hij" * 100]), block_of(["never"])]
    assert sample_texts(iter(blocks), None, num_characters=50) == ["abc", "defg", ("hij" * 100)[:50]]
    chat = EntriesBlock(
        documents=(Document(name="a", chat=Chat(messages=CHAT[:1])), BadDocument(name="b", kind="empty", found="", required=""))
    )
    renderer = ChatTemplates(load_tokenizer(folder))
    assert sample_texts(iter([chat]), renderer, num_characters=50) == ["<|im_start|>user\ncat<|im_end|>\n"]


def test_parts_of_chats_that_the_template_cannot_write_are_counted(job):
    asking = Chat(messages=[*CHAT, {"role": "assistant", "tool_calls": [{"name": "f"}]}], tools=[{"name": "f"}])
    block = EntriesBlock(documents=(Document(name="a", chat=asking), Document(name="b", chat=Chat(messages=CHAT))))
    assert BlockEncoder(job(chats=True))(block).unread == {"tools": 1, "tool_calls": 1}
