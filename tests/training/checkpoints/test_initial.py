"""A model's shape comes from `checkpoint.init_from` where settings do not say it, and contradictions are refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron_dmtd.architecture import RopeScaling
from megatron_dmtd.config import Config, ModelConfig, make_parser, parse, to_yaml
from megatron_dmtd.conversion.convert import import_hf
from megatron_dmtd.errors import CheckpointError, ConfigError, ConversionError, ModelError
from megatron_dmtd.families import ModelDescription, write_fields
from megatron_dmtd.training.checkpoints import paths
from megatron_dmtd.training.checkpoints.initial import find_initial, run_config
from megatron_dmtd.training.plan import make_plan
from megatron_dmtd.weights.checkpoint_files import METADATA_FILE
from tests.hf.test_remote_code import export
from tests.hf.tiny import tiny_model
from tests.support.checkpoints import assert_same_checkpoint
from tests.support.jobs import run_job
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, with_settings
from tools.plan import main as plan

SCALED = {"rope_scaling": RopeScaling(rope_type="linear", factor=2.0), "qkv_bias": True, "family": "qwen2", "qk_norm": False}


def _checkpoint(folder: Path, model: ModelConfig, *, step: int | None = None) -> Path:
    """What is read of a checkpoint before its weights, of an import or of a run."""
    directory = folder if step is None else folder / paths.step_directory_name(step)
    directory.mkdir(parents=True)
    (directory / paths.CONFIG_FILE).write_text(to_yaml(dataclasses.replace(tiny_config("vanilla"), model=model)))
    (directory / METADATA_FILE).write_text("{}")
    if step is not None:
        (folder / paths.LATEST_FILE).write_text(directory.name)
    return directory


def _read(*arguments: str) -> Config:
    parser = make_parser(description="")
    return run_config(parser, parse(parser, arguments), arguments)


@pytest.fixture
def model() -> ModelConfig:
    return tiny_config(model=SCALED).model


@pytest.fixture(params=["import", "run", "Hugging Face"])
def source(request, model: ModelConfig, tmp_path: Path) -> Path:
    """The same model in each form."""
    path = tmp_path / "source"
    if request.param == "Hugging Face":
        path.mkdir()
        fields = write_fields(ModelDescription(model=model, cycle=tiny_config("vanilla").cycle))
        (path / "config.json").write_text(json.dumps(fields))
    else:
        _checkpoint(path, model, step=None if request.param == "import" else 3)
    return path


def test_what_is_not_said_is_that_of_the_source(source: Path, model: ModelConfig, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"checkpoint: {{init_from: {source}}}\noptimizer: {{lr: 0.5}}\n")
    config = _read("--config", str(recipe), "--cycle.num_parallel_layers", "2")
    # a config.json does not hold the standard deviation of initial weights
    assert dataclasses.replace(config.model, init_std=model.init_std) == model
    assert (config.cycle.variant, config.cycle.num_parallel_layers, config.optimizer.lr) == ("bidirectional-refresh", 2, 0.5)


def test_what_is_said_may_repeat_the_source_and_differ_where_no_weight_depends_on_it(source: Path) -> None:
    options = ("--model.num_layers", "4", "--model.init_std", "0.7", "--model.max_position_embeddings", "64")
    config = _read("--checkpoint.init_from", str(source), *options, "--model.rope_scaling.factor", "2")
    assert (config.model.num_layers, config.model.init_std, config.model.max_position_embeddings) == (4, 0.7, 64)
    assert config.model.rope_scaling == SCALED["rope_scaling"]


def test_contradictions_are_refused_all_at_once(source: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {num_layers: 5, hidden_size: 32, qk_norm: true, rope_scaling: {factor: 4.0}}\n")
    with pytest.raises(ConfigError) as caught:
        _read("--config", str(recipe), "--checkpoint.init_from", str(source))
    assert caught.value.found == (
        "model.num_layers = 5, model.rope_scaling.factor = 4.0, model.qk_norm = True in the settings of this run"
    )
    assert "model.num_layers = 4, model.rope_scaling.factor = 2.0, model.qk_norm = False, as in " in caught.value.required
    assert str(source) in caught.value.required and "leave these settings out" in caught.value.remedy


def test_a_run_that_goes_on_has_its_own_shape_though_its_source_is_gone(model: ModelConfig, tmp_path: Path) -> None:
    source = _checkpoint(tmp_path / "source", model)
    options = ("--checkpoint.init_from", str(source), "--checkpoint.dir", str(tmp_path / "run"))
    started = _read(*options)
    _checkpoint(tmp_path / "run", started.model, step=7)
    shutil.rmtree(source)
    assert _read(*options) == started
    with pytest.raises(CheckpointError, match="no directory"):
        _read(*options, "--checkpoint.resume", "false")


def test_without_a_source_nothing_changes(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "run", tiny_config().model, step=7)
    assert _read("--checkpoint.dir", str(tmp_path / "run")).model == ModelConfig()


def test_a_whole_shape_can_be_planned_before_its_source_is_there(tmp_path: Path) -> None:
    config = with_settings(tiny_config(), checkpoint={"init_from": str(tmp_path / "absent")})
    (tmp_path / "whole.yaml").write_text(to_yaml(config))
    assert _read("--config", str(tmp_path / "whole.yaml")) == config
    with pytest.raises(CheckpointError, match="no directory"):
        _read("--checkpoint.init_from", str(tmp_path / "absent"), "--model.num_layers", "4")


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="check the path"):
        find_initial(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ModelError, match="gpt2"):
        find_initial(tmp_path)


def test_a_plan_is_of_the_sources_model(source: Path, model: ModelConfig, tmp_path: Path, capsys, monkeypatch) -> None:
    recipe = tmp_path / "recipe.yaml"
    cycle = "cycle: {num_parallel_layers: 2, mask_token_id: 99}"
    recipe.write_text(f"checkpoint: {{init_from: {source}}}\n{cycle}\ndata: {{train: [x], seq_length: 32, pad_token_id: 0}}\n")
    monkeypatch.setattr("sys.argv", ["plan.py", "--config", str(recipe), "--json"])
    assert plan() == 0
    planned = json.loads(capsys.readouterr().out)
    expected = make_plan(dataclasses.replace(tiny_config(data={"train": ("x",)}), model=model), world_size=1)
    assert planned["num_parameters"] == expected.num_parameters


@pytest.mark.multiprocess
def test_a_directory_starts_a_run_as_its_import_does_bit_for_bit(corpus: tuple[str, str], tmp_path: Path) -> None:
    """In bf16, whose fp32 copies are made of the weights that were loaded."""
    model = tiny_model("causal-refresh", dtype=torch.float32, vocab_size=100, mask_token_id=99)
    export(model, tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "import")
    config = tiny_config(
        model={"init_std": 0.02, "rope_theta": 10_000.0, "max_position_embeddings": 512, "tie_word_embeddings": False},
        data={"train": (corpus[0],)},
        training={"precision": "bf16", "steps": 1},
        optimizer={"decay_steps": 6},
    )
    for name in ("hf", "import"):
        checkpoint = {"dir": str(tmp_path / f"from-{name}"), "init_from": str(tmp_path / name)}
        run_ranks(2, run_job, with_settings(config, checkpoint=checkpoint))
    assert_same_checkpoint(*(tmp_path / f"from-{name}" / paths.step_directory_name(1) for name in ("hf", "import")))


@pytest.mark.multiprocess
def test_a_directory_with_other_tensors_is_refused_before_any_group_exists(corpus: tuple[str, str], tmp_path: Path) -> None:
    from megatron_dmtd.platform import prepare_megatron

    prepare_megatron()
    from megatron_dmtd.training.start import check

    model = tiny_model("causal-refresh", dtype=torch.float32, vocab_size=100, mask_token_id=99)
    export(model, tmp_path / "hf")
    fields = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(fields | {"attention_bias": True}))
    config = tiny_config(data={"train": (corpus[0],)}, checkpoint={"init_from": str(tmp_path / "hf")})
    shape = dataclasses.replace(find_initial(tmp_path / "hf").model, init_std=config.model.init_std)
    with pytest.raises(ConversionError, match=r"model.layers.0.self_attn.q_proj.bias"):
        check(dataclasses.replace(config, model=shape), world_size=1)
    with pytest.raises(CheckpointError, match=r"model.qkv_bias = True in the checkpoint, False in this run"):
        check(config, world_size=1)
