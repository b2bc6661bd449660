"""A prompt has the ids that the same text had in the corpus that a model was trained on, whatever its tokenizer adds."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_dmtd.conversion.hf_directory import write_hf_directory
from megatron_dmtd.data.batches.token_file import TokenFile
from megatron_dmtd.data.corpora.bos import check_bos
from megatron_dmtd.data.corpora.preprocess import PreprocessOptions, preprocess
from megatron_dmtd.data.corpora.sources import open_inputs
from megatron_dmtd.data.corpora.tokenizer import load_tokenizer, tokenizer_sha256
from megatron_dmtd.data.corpora.verify import check_tokenizer
from megatron_dmtd.families import ModelDescription, write_fields
from megatron_dmtd.inference import text as prompts
from tests.support.hf_models import VANILLA, random_hf_directory, small_model
from tests.support.tokenizers import PROCESSORS, chat_tokenizer

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
