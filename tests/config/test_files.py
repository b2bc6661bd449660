"""Faults of settings files, each with file and line."""

import pytest

from megatron_dmtd.config import Config, from_yaml, load_config
from megatron_dmtd.config.files import line_of, named_files
from megatron_dmtd.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("model:\n  num_layers: 3\noptimiser:\n  lr: 1\n", ", line 4: unknown setting optimiser.lr"),
        ("model:\n  rope_scaling:\n    facto: 2\n", ", line 3: unknown setting model.rope_scaling.facto"),
        ("model:\n  num_layers: [\n", ", line 3: "),
        ("training:\n\tsteps: 5\n", ", line 2: "),
        ("\n\nmodel:\n  num_layers: x\n", ", line 4: model.num_layers = x"),
        ("data:\n  train: abc\n", ", line 2: data.train = abc"),
        ("cycle:\n  variant: causal\n", ", line 2: "),
        ("training:\n  steps: 5\n  steps: 6\n", ", line 3: training.steps a second time, after line 2"),
        ("training: {steps: 5}\nmodel: {}\ntraining: {lr: 6}\n", ", line 3: training a second time, after line 1"),
        ("model: 5\n", ", line 1: model without settings"),
        ("data:\nmodel: {}\n", ", line 1: data without settings"),
        ("model:\n  rope_scaling: 5\n", ", line 2: model.rope_scaling without settings"),
        ("? [a]\n: 4\n", ": "),
        ("- a\n", ": a list or a single value"),
        ("", ": no settings"),
    ],
)
def test_a_fault_is_named_with_its_file_and_line(text, found, tmp_path):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("optimizer: {lr: 1.0e-3}\n")
    bad.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", str(good), f"--config={bad}", "--optimizer.lr", "2e-3"])
    assert caught.value.found.startswith(f"{bad}{found}")


def test_bytes_that_are_no_text_and_paths_that_are_no_files_are_refused_by_name(tmp_path):
    (tmp_path / "latin1.yaml").write_bytes(b"data: {train: [caf\xe9]}\n")
    for name, words in (("latin1.yaml", "bytes that are not UTF-8"), ("absent.yaml", "no file"), ("", "directory")):
        with pytest.raises(ConfigError, match=words) as caught:
            from_yaml(tmp_path / name)
        assert str(tmp_path / name) in caught.value.found


def test_a_fault_of_an_option_is_not_blamed_on_a_file(tmp_path):
    (tmp_path / "a.yaml").write_text("optimizer: {lr: 1.0e-3}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", str(tmp_path / "a.yaml"), "--optimizer.lr", "fast"])
    assert (caught.value.found, caught.value.required) == ("optimizer.lr = fast", "a number")


def test_a_file_may_set_nothing_of_a_section_and_write_settings_with_dots(tmp_path):
    (tmp_path / "a.yaml").write_text("model: {}\noptimizer.lr: 1.0e-3\n")
    config = from_yaml(tmp_path / "a.yaml")
    assert config.optimizer.lr == 1e-3 and config.model == Config().model
    assert (line_of(tmp_path / "a.yaml", "optimizer.lr"), line_of(tmp_path / "a.yaml", "optimizer.eps")) == (2, None)


def test_files_are_named_in_either_form_of_the_option():
    assert named_files(["--config", "a", "--x", "1", "--config=b"]) == ["a", "b"]
