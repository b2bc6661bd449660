"""What begins documents, by tokenizers that begin and end texts in different manners."""

import json

import pytest
from tokenizers import Tokenizer, processors

from megatron_dmtd.data.batches.manifest import dump_manifest, manifest_path
from megatron_dmtd.data.corpora.bos import bos_of, bos_of_corpora, check_bos, ids_by, with_bos
from megatron_dmtd.data.corpora.preprocess import PreprocessOptions, preprocess
from megatron_dmtd.data.corpora.sources import open_inputs
from megatron_dmtd.data.corpora.tokenizer import load_tokenizer
from megatron_dmtd.errors import ConfigError, DataError
from megatron_dmtd.infra.special_tokens import added_ids
from tests.support.tokenizers import PROCESSORS, chat_tokenizer, with_processor

TEXTS = ["the cat", "é", "on the mat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEXTS, vocab_size=290)


@pytest.fixture(scope="module")
def plain(folder):
    return (load_tokenizer(folder).backend_tokenizer).to_str()


@pytest.mark.parametrize(
    ("name", "before", "after"), [("none", [], []), ("bos", [1], []), ("both", [1], [0]), ("byte-level", [1], [])]
)
def test_what_a_tokenizer_adds_is_seen_from_outside(plain, name, before, after):
    assert added_ids(ids_by(Tokenizer.from_str(with_processor(plain, PROCESSORS[name])))) == (before, after)


@pytest.mark.parametrize("bos", [None, 0, 1])
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_tokenizer_can_be_made_to_begin_texts_with_any_special_token_or_none(plain, name, bos):
    before = Tokenizer.from_str(with_processor(plain, PROCESSORS[name]))
    changed = Tokenizer.from_str(with_bos(before.to_str(), bos))
    for text in ("the cat", "", "é <|pad|> ", "a\n"):
        ids = before.encode(text, add_special_tokens=False).ids
        assert changed.encode(text, add_special_tokens=False).ids == ids
        assert changed.encode(text).ids == ids if bos is None else [bos, *ids]
    with pytest.raises(DataError, match="BOS id 77, which is no special token"):
        with_bos(plain, 77)


def test_steps_that_add_nothing_are_kept(plain):
    changed = json.loads(with_bos(with_processor(plain, PROCESSORS["byte-level"]), None))
    assert changed["post_processor"]["type"] == "ByteLevel"


def test_the_tokenizer_decides_unless_it_is_asked_otherwise(folder):
    tokenizer = load_tokenizer(folder)
    assert (bos_of(tokenizer), bos_of(tokenizer, "no")) == (None, None)
    with pytest.raises(DataError, match="has no BOS token"):
        bos_of(tokenizer, "yes")
    tokenizer.bos_token = "<|pad|>"
    assert bos_of(tokenizer, "yes") == 1
    tokenizer.backend_tokenizer.post_processor = PROCESSORS["bos"]
    assert [bos_of(tokenizer, wanted) for wanted in ("auto", "yes", "no")] == [1, 1, None]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> <|mask|> $A", special_tokens=[("<|pad|>", 1), ("<|mask|>", 2)]
    )
    with pytest.raises(DataError, match=r"begins each text with 2 tokens: \[1, 2\]"):
        bos_of(tokenizer)
    assert bos_of(tokenizer, "no") is None


@pytest.fixture(scope="module")
def corpora(folder, tmp_path_factory):
    """Prefixes of corpora made with and without BOS, of chats, and by a version that knew no BOS."""
    root = tmp_path_factory.mktemp("corpora")
    (root / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    tokenizer = load_tokenizer(folder)
    tokenizer.bos_token = "<|pad|>"
    tokenizer.save_pretrained(root / "tokenizer")
    found = {}
    for wanted in ("auto", "yes", "no"):
        found[wanted] = str(root / wanted)
        options = PreprocessOptions(
            tokenizer_dir=str(root / "tokenizer"), output_prefix=found[wanted], add_bos=wanted, num_workers=1
        )
        manifest = preprocess(open_inputs([str(root / "a.jsonl")]), options).manifests[found[wanted]]
        assert (manifest.add_bos, manifest.bos_token_id) == (("yes", 1) if wanted == "yes" else ("no", None))
    fields = json.loads(dump_manifest(manifest))
    for name, add_bos in (("chats", "template"), ("old", None)):
        found[name] = str(root / name)
        changed = fields | {"add_bos": add_bos}
        manifest_path(found[name]).write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))
    return found | {"tokenizer": str(root / "tokenizer"), "none": str(root / "absent")}


def test_corpora_that_begin_alike_say_so_and_mixtures_are_refused(corpora):
    assert bos_of_corpora([corpora["no"], corpora["auto"], corpora["old"], corpora["chats"], corpora["none"]]) == "no"
    assert bos_of_corpora([corpora["yes"], corpora["chats"]]) == "yes"
    assert bos_of_corpora([corpora["chats"], corpora["none"]]) == bos_of_corpora([]) == "auto"
    with pytest.raises(ConfigError, match=r"old without BOS; .*yes with BOS 1 before each document"):
        bos_of_corpora([corpora["old"], corpora["yes"]])


def test_a_corpus_that_begins_otherwise_than_a_models_prompts_is_refused(corpora):
    for name in ("no", "old", "chats", "none"):
        check_bos(corpora[name], corpora["tokenizer"])
    with pytest.raises(DataError, match=r"yes with BOS 1 before each document, and a model whose tokenizer .* without it"):
        check_bos(corpora["yes"], corpora["tokenizer"])
