from pathlib import Path

import pytest

from megatron_dmtd.architecture import RopeScaling
from megatron_dmtd.config import Config, from_yaml, load_config, make_parser, to_yaml
from megatron_dmtd.config.load import known_keys
from megatron_dmtd.errors import ConfigError


def test_later_settings_win_and_yaml_gives_the_same_configuration_back(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "optimizer: {lr: 1.0e-3, min_lr: 1.0e-5}\nparallel: {stage_layers: [20, 8, 8], pipeline: 3}\n"
    )
    (tmp_path / "b.yaml").write_text("optimizer: {lr: 2.0e-3}\n")
    config = load_config(
        ["--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml"), "--optimizer.min_lr", "3e-5"]
    )
    assert (config.optimizer.lr, config.optimizer.min_lr) == (2e-3, 3e-5)
    assert config.parallel.stage_layers == (20, 8, 8)
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    assert from_yaml(tmp_path / "c.yaml") == config
    assert load_config([]) == Config()


def test_a_section_inside_a_section_is_set_by_file_and_by_option_and_written_back(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: {rope_scaling: {rope_type: yarn, factor: 4}, windowed_layers: [1]}\n")
    config = load_config(["--config", str(tmp_path / "a.yaml"), "--model.rope_scaling.original_max_position_embeddings", "32768"])
    expected = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)
    assert config.model.rope_scaling == expected and config.model.windowed_layers == (1,)
    (tmp_path / "b.yaml").write_text(to_yaml(config))
    assert from_yaml(tmp_path / "b.yaml") == config
    with pytest.raises(ConfigError, match=r"did you mean model\.rope_scaling\.factor"):
        load_config(["--model.rope_scaling.facto", "4"])


@pytest.mark.parametrize(
    ("arguments", "found", "remedy"),
    [
        (["--optimiser.lr", "1"], "unknown setting optimiser.lr", "did you mean optimizer.lr?"),
        (["--optimizer.learning_rate", "1"], "unknown setting optimizer.learning_rate", "did you mean"),
        (["--lr", "1"], "unknown setting lr", "did you mean optimizer.lr?"),
        (["--zzzzzz", "1"], "unknown setting zzzzzz", "see --help"),
        (["--data.train", "data/a"], "data.train = data/a", "write a list: --data.train '[data/a]'"),
    ],
)
def test_a_setting_that_cannot_be_read_says_what_to_write(arguments: list[str], found: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(arguments)
    assert caught.value.found == found
    assert caught.value.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("text", "closest"), [("model: {num_layer: 3}", "model.num_layers"), ("modl: {num_layers: 3}", "model.num_layers")]
)
def test_an_unknown_key_in_a_file_names_the_closest_one(text: str, closest: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"did you mean {closest}"):
        from_yaml(tmp_path / "a.yaml")


def test_a_value_of_the_wrong_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        load_config(["--optimizer.lr", "fast"])
    with pytest.raises(ConfigError, match="bidirectional-refresh"):
        load_config(["--cycle.variant", "bidirectional"])
    with pytest.raises(ConfigError, match="no file"):
        from_yaml(tmp_path / "absent.yaml")


def test_help_explains_every_setting() -> None:
    text = make_parser(description="x").format_help()
    for key in known_keys():
        assert f"--{key} " in text
    words = " ".join(text.split())
    assert "Tokens per cycle. Above 0. Fixed for a resumed run. (type: int, default: 4)" in words
    assert "Adam's epsilon. Above 0. (type: float, default: 1e-08)" in words
    assert "Decay of Adam's first moment. At least 0 and below 1. (type: float, default: 0.9)" in words
    assert "Ratio of the longer context to the original one; at least 1. Fixed for a resumed run. (type: float" in words


def test_the_help_keeps_the_lines_of_the_description() -> None:
    text = make_parser(description="First line.\n\n  a list\n  of two", prog="train.py").format_help()
    assert "First line.\n\n  a list\n  of two\n" in text
