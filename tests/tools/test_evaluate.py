"""The command's figures on a model of random weights, and its report."""

import json

import numpy as np
import pytest
import torch

from megatron_dmtd.inference import Engine
from tests.tools.text_model import save_text_model
from tools.evaluate import agreement, loss_by_phase, main

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
