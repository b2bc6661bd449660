import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_dmtd.config import CycleConfig
from megatron_dmtd.conversion.convert import export_hf, import_hf
from megatron_dmtd.conversion.hf_directory import write_hf_directory
from megatron_dmtd.conversion.tokenizer_files import check_mask, generation_settings, special_ids, tokenizer_files
from megatron_dmtd.data.batches.token_file import TokenFile
from megatron_dmtd.data.corpora.bos import check_bos
from megatron_dmtd.data.corpora.preprocess import PreprocessOptions, preprocess
from megatron_dmtd.data.corpora.sources import open_inputs
from megatron_dmtd.data.corpora.tokenizer import load_tokenizer, tokenizer_sha256
from megatron_dmtd.data.corpora.verify import check_tokenizer
from megatron_dmtd.errors import ConversionError, DataError
from megatron_dmtd.families import ModelDescription, write_fields
from megatron_dmtd.inference import text as prompts
from tests.support.hf_models import VANILLA, random_hf_directory, save_tokenizer, small_model
from tests.support.tokenizers import PROCESSORS, chat_tokenizer


def cycle(mask: int) -> CycleConfig:
    return CycleConfig(variant="causal-refresh", num_parallel_layers=2, mask_token_id=mask)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=280)


def test_only_the_tokenizers_files_are_named(tokenizer, tmp_path):
    for name in ("tokenizer.json", "chat_template.jinja", "qwen.tiktoken", "spiece.model", "notes.txt", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    names = [path.name for path in tokenizer_files(tmp_path)]
    assert names == ["chat_template.jinja", "qwen.tiktoken", "spiece.model", "tokenizer.json"]
    assert [path.name for path in tokenizer_files(tokenizer)] == [
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


@pytest.mark.parametrize(("mask", "named"), [(50, "the ordinary token"), (0, "MASK id 0, EOS id 0")])
def test_a_mask_that_text_may_hold_is_refused(tokenizer, mask, named):
    check_mask(cycle(2), tokenizer)
    check_mask(cycle(299), tokenizer)  # beyond the tokenizer's ids: no text gives it
    check_mask(CycleConfig(variant="vanilla"), tokenizer)
    with pytest.raises(DataError, match=named):
        check_mask(cycle(mask), tokenizer)


def test_an_import_with_such_a_mask_writes_nothing(tokenizer, tmp_path):
    hf = random_hf_directory(tmp_path / "hf", small_model(vocab_size=300), tokenizer_dir=tokenizer)
    with pytest.raises(DataError, match="the ordinary token"):
        import_hf(hf, tmp_path / "start", cycle=cycle(50))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_an_export_with_such_a_mask_writes_nothing(tokenizer, tmp_path):
    hf = random_hf_directory(tmp_path / "hf", small_model(vocab_size=300), cycle=cycle(50))
    import_hf(hf, tmp_path / "start")
    with pytest.raises(DataError, match="the ordinary token"):
        export_hf(tmp_path / "start", tmp_path / "out", tokenizer_dir=tokenizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "start"]
    export_hf(tmp_path / "start", tmp_path / "out", tokenizer_dir=tokenizer, as_vanilla=True)


def test_generation_settings_are_those_that_came_with_the_model(tokenizer, tmp_path):
    hf = random_hf_directory(tmp_path / "hf", small_model(vocab_size=300), cycle=cycle(2), tokenizer_dir=tokenizer)
    settings = {"do_sample": True, "temperature": 0.6, "eos_token_id": [0, 7], "pad_token_id": 0}
    (hf / "generation_config.json").write_text(json.dumps(settings))
    import_hf(hf, tmp_path / "start")
    export_hf(tmp_path / "start", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == settings
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (fields["eos_token_id"], fields["pad_token_id"]) == ([0, 7], 0) and "bos_token_id" not in fields


def test_without_settings_the_ids_are_those_that_the_tokenizer_names(tokenizer, tmp_path):
    assert generation_settings(tokenizer) == {"eos_token_id": 0, "pad_token_id": 1}
    assert generation_settings(None) == {} == generation_settings(tmp_path)
    assert special_ids({"eos_token_id": 0, "temperature": 0.6, "bos_token_id": None}) == {"eos_token_id": 0}


@pytest.mark.parametrize(("text", "named"), [("{", "Expecting property name"), ("[]", "not a JSON object")])
def test_broken_generation_settings_are_refused(tmp_path, text, named):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConversionError, match=named):
        generation_settings(tmp_path)


TEXTS = ["the cat sat", "é", "on the mat\n", " two  spaces "]


@pytest.mark.parametrize("add_bos", ["auto", "yes", "no"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_prompts_are_what_training_saw(tmp_path, name, add_bos):
    folder = tmp_path / "tokenizer"
    chat_tokenizer(folder, TEXTS, vocab_size=290)
    tokenizer = load_tokenizer(folder)
    tokenizer.bos_token = "<|pad|>"
    if PROCESSORS[name] is not None:
        tokenizer.backend_tokenizer.post_processor = PROCESSORS[name]
    tokenizer.save_pretrained(folder)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    options = PreprocessOptions(tokenizer_dir=str(folder), output_prefix=str(tmp_path / "c"), add_bos=add_bos, num_workers=1)
    manifest = preprocess(open_inputs([str(tmp_path / "a.jsonl")]), options).manifests[str(tmp_path / "c")]
    begins = add_bos == "yes" or (add_bos == "auto" and name != "none")
    assert manifest.bos_token_id == (1 if begins else None)
    stored = TokenFile(str(tmp_path / "c"))
    documents = [stored.read(nth, 0, int(stored.lengths(nth, nth + 1)[0])).tolist() for nth in range(len(stored))]
    assert all(ids[-1] == 0 and (ids[0] == 1) == begins and ids.count(1) == begins for ids in documents)

    model = small_model(vocab_size=300)
    random_hf_directory(tmp_path / "random", model)
    export = tmp_path / "export"
    write_hf_directory(
        export,
        fields=write_fields(ModelDescription(model=model, cycle=VANILLA)),
        specs={},
        tensors=[],
        tokenizer_dir=folder,
        add_bos=manifest.add_bos,
    )
    for ids, text in zip(documents, TEXTS, strict=True):
        assert prompts.encode(prompts.load_tokenizer(export), text) == ids[:-1]
        theirs = AutoTokenizer.from_pretrained(export)(text)["input_ids"]
        assert theirs == ids[:-1] or (add_bos == "auto" and name == "both" and theirs == ids), "a copied file may append EOS"
    check_bos(str(tmp_path / "c"), str(export))
    check_tokenizer(str(tmp_path / "c"), str(export))
    same = (export / "tokenizer.json").read_bytes() == (Path(folder) / "tokenizer.json").read_bytes()
    assert same == (begins == (name != "none") and name != "both") and tokenizer_sha256(export) == tokenizer_sha256(folder)
