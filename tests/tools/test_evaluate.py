"""The command's figures on a model of random weights, and its report."""

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_dmtd.data.batches.manifest import Manifest
from megatron_dmtd.errors import ConfigError
from megatron_dmtd.inference import Engine
from tests.tools.text_model import save_text_model
from tools.evaluate import agreement, check_tokenizers, loss_by_phase, main

OPTIONS = ["--device", "cpu", "--prompt-length", "6", "--max-new-tokens", "9", "--max-length", "40", "--documents", "3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_text_model(tmp_path_factory.mktemp("text") / "model")


def test_a_report_from_a_text(folder, tmp_path, capsys):
    (tmp_path / "text").write_text("The quick brown fox jumps over the lazy dog. " * 4)
    report = tmp_path / "report"
    assert main([str(folder), "--text", str(tmp_path / "text"), "--output", str(report), *OPTIONS]) == 0
    results = json.loads((report / "results.json").read_text())
    assert results["variant"] == "bidirectional-refresh" and results["reference"]["variant"] == "vanilla"
    assert results["held_out"]["tokens"] == 3 * 39
    assert len(results["held_out"]["loss_by_phase"]) == 4
    assert 0 <= results["agreement"]["share"] < 1
    assert len(results["agreement"]["share_by_distance"]) == 9
    assert results["speed"]["tokens_per_s"] > 0
    for name in ("loss.png", "agreement.png", "speed.png"):
        assert (report / name).read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report", "text"]
    assert "by phase" in capsys.readouterr().out
    assert main([str(folder), "--text", str(tmp_path / "text"), "--output", str(report), *OPTIONS]) == 2
    assert "exists" in capsys.readouterr().err


def test_a_model_agrees_with_itself_on_a_token_file(folder, tmp_path):
    write_token_file(tmp_path / "valid", [[5] * 3, [*range(30)], [*range(60, 90)]])
    arguments = ["--data", str(tmp_path / "valid"), "--reference", str(folder), "--output", str(tmp_path / "report")]
    assert main([str(folder), *arguments, *OPTIONS]) == 0
    results = json.loads((tmp_path / "report" / "results.json").read_text())
    assert results["agreement"] == {
        "share": 1.0, "share_by_distance": [1.0] * 9, "common_beginning": 9.0, "outputs": 2
    }  # fmt: skip
    assert results["held_out"] == results["reference"]["held_out"]


def write_token_file(prefix, documents) -> None:
    from megatron_dmtd.data.batches.token_file import write_index

    np.concatenate([np.array(document, np.uint16) for document in documents]).tofile(f"{prefix}.bin")
    lengths = prefix.with_suffix(".lengths")
    np.array([len(document) for document in documents], np.int32).tofile(lengths)
    write_index(prefix.with_suffix(".idx"), lengths, dtype=np.uint16)


def write_manifest(prefix, folder, **changes) -> None:
    """As `tools/preprocess.py` would, for the tokenizer in `folder`."""
    from megatron_dmtd.data.corpora.tokenizer import tokenizer_sha256

    required = dict.fromkeys((item.name for item in dataclasses.fields(Manifest) if _is_required(item)), 0)
    fields = required | {"dtype": "uint16", "source": "test", "split": "all", "heldout_fraction": 0.0}
    Path(f"{prefix}.json").write_text(json.dumps(fields | {"tokenizer_sha256": tokenizer_sha256(folder)} | changes))


def _is_required(item: dataclasses.Field) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def test_token_files_of_another_tokenizer_are_refused_before_any_work(folder, tmp_path, capsys):
    write_token_file(tmp_path / "valid", [[*range(30)], [*range(60, 90)]])
    arguments = [str(folder), "--data", str(tmp_path / "valid"), *OPTIONS]
    write_manifest(tmp_path / "valid", folder, tokenizer_sha256="0" * 64)
    assert main([*arguments, "--output", str(tmp_path / "report")]) == 2
    refused = capsys.readouterr().err
    assert f"found: {folder}/tokenizer.json with the sha256" in refused and f"made {tmp_path / 'valid'}: 0000000000" in refused
    assert not (tmp_path / "report").exists()
    write_manifest(tmp_path / "valid", folder)
    assert main([*arguments, "--output", str(tmp_path / "report")]) == 0
    assert capsys.readouterr().err == ""


def test_what_cannot_be_compared_is_said(folder, tmp_path, capsys):
    write_token_file(tmp_path / "valid", [[*range(30)]])
    options = argparse.Namespace(model=str(folder), data=str(tmp_path / "valid"), reference=None)
    check_tokenizers(options)
    assert capsys.readouterr().err.endswith(f"tokenizer: {tmp_path / 'valid'} has no manifest\n")
    write_manifest(tmp_path / "valid", folder)
    check_tokenizers(options)
    assert capsys.readouterr().err == ""
    (tmp_path / "model").mkdir()
    check_tokenizers(argparse.Namespace(model=str(tmp_path / "model"), data=str(tmp_path / "valid"), reference=None))
    assert capsys.readouterr().err.endswith("model has no tokenizer.json\n")


def test_a_reference_has_the_models_tokenizer(folder, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))  # written differently
    options = argparse.Namespace(model=str(folder), data=None, reference=str(other))
    check_tokenizers(options)
    assert capsys.readouterr().err == ""
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="describes another tokenizer than"):
        check_tokenizers(options)


def test_loss_by_phase_is_that_of_the_training_forward(folder):
    from megatron_dmtd.hf import DMTDQwen3ForCausalLM

    ids = torch.arange(3, 24)[None]
    slow = DMTDQwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(slow(ids).logits[0, :-1], ids[0, 1:], reduction="none")
    figures = loss_by_phase(Engine(folder, device="cpu"), ids.tolist())
    assert figures["loss"] == pytest.approx(float(loss.mean()), rel=1e-4)
    assert figures["loss_by_phase"] == pytest.approx([float(loss[phase::4].mean()) for phase in range(4)], rel=1e-4)
    assert loss_by_phase(Engine(folder, device="cpu"), [[1, 2]])["loss_by_phase"][1:] == [None] * 3


def test_agreement_counts_by_distance():
    figures = agreement([[1, 2, 3], [4, 5, 6]], [[1, 2, 9], [0, 5, 6]])
    assert figures["share_by_distance"] == [0.5, 1.0, 0.5]
    assert figures["common_beginning"] == 1.0
    assert figures["share"] == pytest.approx(4 / 6)


def test_refusals(folder, tmp_path, capsys):
    output = ["--output", str(tmp_path / "report")]
    assert main([str(folder), "--text", str(tmp_path / "absent"), *output, *OPTIONS]) == 2
    assert "a text file" in capsys.readouterr().err
    (tmp_path / "short").write_text("abc")
    assert main([str(folder), "--text", str(tmp_path / "short"), *output, *OPTIONS]) == 2
    assert "documents of at most 3 tokens" in capsys.readouterr().err
    (tmp_path / "long").write_text("abc" * 20)
    assert main([str(folder), "--text", str(tmp_path / "long"), *output, *OPTIONS, "--max-new-tokens", "600"]) == 2
    assert "texts of 606 tokens" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


def test_what_cannot_be_written_or_read_is_refused_before_any_work(folder, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    (tmp_path / "latin").write_bytes("né".encode("latin-1") * 50)
    output = ["--output", str(tmp_path / "file" / "report")]
    assert main([str(folder), "--text", str(tmp_path / "latin"), *output, *OPTIONS]) == 2
    assert "a folder that can be created" in capsys.readouterr().err
    output = ["--output", str(tmp_path / "new" / "report")]
    assert main([str(folder), "--text", str(tmp_path / "latin"), *output, *OPTIONS]) == 2
    assert "a text file in UTF-8" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(folder), "--text", "x", *output, *OPTIONS, "--documents", "0"])
    assert "0 is less than 1" in capsys.readouterr().err


def test_ctrl_c_leaves_nothing_behind(folder, tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    (tmp_path / "text").write_text("The quick brown fox. " * 9)
    monkeypatch.setattr("tools.evaluate.draw", interrupted)
    assert main([str(folder), "--text", str(tmp_path / "text"), "--output", str(tmp_path / "report"), *OPTIONS]) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["text"]
    assert "interrupted" in capsys.readouterr().err
