import shutil

import pytest
from tokenizers import processors

from megatron_dmtd.errors import CheckpointError, DataError
from megatron_dmtd.inference.text import encode, load_tokenizer
from tests.inference.tokenizers_in_memory import byte_level, metaspace
from tests.tools.text_model import save_text_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_text_model(tmp_path_factory.mktemp("text") / "model")


def test_a_models_tokenizer_is_loaded_with_it(folder):
    assert encode(load_tokenizer(folder), "ab") == encode(load_tokenizer(folder), "ab", add_special_tokens=False)
    assert load_tokenizer(folder).decode(encode(load_tokenizer(folder), "né")) == "né"


def test_a_model_without_a_tokenizer_and_a_damaged_one_are_refused_by_name(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="that transformers cannot read"):
        load_tokenizer(tmp_path / "model")
    for path in (tmp_path / "model").glob("tokenizer*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=f"no tokenizer in {tmp_path / 'model'}"):
        load_tokenizer(tmp_path / "model")
    with pytest.raises(CheckpointError, match="no tokenizer in None"):
        load_tokenizer(None)


def test_a_directory_that_is_no_model_is_not_blamed_on_its_tokenizer(folder, tmp_path):
    with pytest.raises(CheckpointError, match="no directory"):
        load_tokenizer(tmp_path / "absent")


def test_special_tokens_are_added_unless_a_template_has_done_so():
    tokenizer = metaspace()
    tokenizer.add_bos_token = True
    plain = encode(tokenizer, "the fox", add_special_tokens=False)
    assert tokenizer.decode(plain) == "the fox" and encode(tokenizer, "the fox")[-len(plain) :] == plain


@pytest.mark.parametrize(("single", "before"), [("<s> $A </s>", [1]), ("$A </s>", []), ("</s> $A", [2]), ("<s> $A", [1])])
def test_an_end_of_text_that_a_tokenizer_appends_is_left_out_and_nothing_else_is(single, before):
    """Also where BOS is EOS, and where the text is empty."""
    tokenizer = metaspace()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    for text in ("the fox", "", "x</s>"):
        assert encode(tokenizer, text) == before + encode(tokenizer, text, add_special_tokens=False)


def test_text_that_is_not_unicode_is_refused_with_its_place():
    half = b"caf\xe9".decode("utf-8", errors="surrogateescape")
    with pytest.raises(DataError, match="not valid Unicode at character 3"):
        encode(byte_level(), half)
