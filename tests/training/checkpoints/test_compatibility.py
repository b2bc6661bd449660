from pathlib import Path

import pytest

from megatron_dmtd.architecture import RopeScaling
from megatron_dmtd.config import Config, to_yaml
from megatron_dmtd.config.metadata import settings
from megatron_dmtd.errors import CheckpointError
from megatron_dmtd.training.checkpoints import paths
from megatron_dmtd.training.checkpoints.compatibility import check_resumable, check_weights, differences
from megatron_dmtd.training.checkpoints.initial import Initial
from megatron_dmtd.weights.checkpoint_files import saved_config
from tests.support.tiny import tiny_config, with_settings


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    (tmp_path / paths.CONFIG_FILE).write_text(to_yaml(tiny_config()))
    return tmp_path


def test_the_same_configuration_differs_in_nothing(saved: Path) -> None:
    assert differences(tiny_config(), check_resumable(tiny_config(), saved)) == []


def test_each_difference_says_whether_it_is_allowed_and_why(saved: Path) -> None:
    changed = tiny_config(optimizer={"lr": 1e-2}, parallel={"tensor": 2}, model={"init_std": 0.2}, logging={"interval": 7})
    told = [str(difference) for difference in differences(changed, check_resumable(changed, saved))]
    assert told == [
        "model.init_std = 0.1 in the checkpoint, 0.2 in this run (allowed: the weights have already been initialised)",
        "parallel.tensor = 1 in the checkpoint, 2 in this run (allowed: the state is resharded: the same run up to rounding)",
        "optimizer.lr = 0.003 in the checkpoint, 0.01 in this run (allowed: the schedule follows the new value from here on)",
        "logging.interval = 1 in the checkpoint, 7 in this run (allowed: affects how the run works, not what it computes)",
    ]


def test_a_run_does_not_go_on_with_documents_that_begin_otherwise(saved: Path) -> None:
    with_bos, without_bos = tiny_config(data={"add_bos": "yes"}), tiny_config(data={"add_bos": "no"})
    assert check_resumable(with_bos, saved) == tiny_config()  # no manifest had said it
    (saved / paths.CONFIG_FILE).write_text(to_yaml(with_bos))
    check_resumable(with_bos, saved)
    with pytest.raises(CheckpointError, match=r"data\.add_bos = yes in the checkpoint, no in this run \(all documents of a run"):
        check_resumable(without_bos, saved)


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("model", "intermediate_size", 64),
        ("model", "tie_word_embeddings", False),
        ("cycle", "variant", "causal-refresh"),
        ("cycle", "num_parallel_layers", 1),
        ("data", "seq_length", 64),
        ("data", "shuffle_seed", 1),
        ("data", "pad_token_id", 1),
        ("parallel", "distributed_optimizer", False),
        ("training", "freeze_embeddings", True),
    ],
)
def test_what_makes_another_run_is_refused_together_with_what_is_allowed(
    saved: Path, section: str, field: str, value: object
) -> None:
    changed = with_settings(tiny_config(optimizer={"lr": 1e-2}), **{section: {field: value}})
    with pytest.raises(CheckpointError) as caught:
        check_resumable(changed, saved)
    old = getattr(getattr(tiny_config(), section), field)
    (why,) = {setting.resume.why for setting in settings(Config) if setting.key == f"{section}.{field}"}
    assert f"{section}.{field} = {old} in the checkpoint, {value} in this run ({why}); optimizer.lr" in caught.value.found
    assert "init_from" in caught.value.remedy


def test_the_precision_may_change_with_the_distributed_optimizer_alone(tmp_path: Path) -> None:
    for distributed in (True, False):
        config = tiny_config(parallel={"distributed_optimizer": distributed})
        (tmp_path / paths.CONFIG_FILE).write_text(to_yaml(config))
        changed = with_settings(config, training={"precision": "bf16"})
        if distributed:
            assert [difference.refused for difference in differences(changed, check_resumable(changed, tmp_path))] == [""]
        else:
            with pytest.raises(CheckpointError, match=r"this run \(without parallel.distributed_optimizer Megatron stores"):
                check_resumable(changed, tmp_path)


def _initial(saved: Path) -> Initial:
    return Initial(directory=saved, model=saved_config(saved).model, is_hugging_face=False)


def test_weights_must_have_the_models_shape_and_nothing_else(saved: Path) -> None:
    check_weights(tiny_config("vanilla", data={"seq_length": 64}, model={"init_std": 1.0}), _initial(saved))
    with pytest.raises(CheckpointError, match=r"model.num_layers = 4 in the checkpoint, 5 in this run"):
        check_weights(tiny_config(model={"num_layers": 5}), _initial(saved))


def test_a_setting_of_a_nested_section_is_named_by_itself(saved: Path) -> None:
    scaled = tiny_config(model={"rope_scaling": RopeScaling(rope_type="linear", factor=2.0)})
    with pytest.raises(CheckpointError) as caught:
        check_weights(scaled, _initial(saved))
    assert "model.rope_scaling.rope_type = default in the checkpoint, linear in this run (another model)" in caught.value.found
    assert "model.rope_scaling.factor = 1.0 in the checkpoint, 2.0 in this run (another model)" in caught.value.found


def test_the_deviation_of_new_weights_is_part_of_a_normalized_model(tmp_path: Path) -> None:
    def made(init_std: float, **changes: object) -> Config:
        return tiny_config("vanilla", model={"init_std": init_std, **changes})

    normalized = {"normalized": True, "tie_word_embeddings": False}
    for changes, refused in (({}, []), (normalized, ["model.init_std"])):
        found = differences(made(0.03, **changes), made(0.02, **changes))
        assert [one.setting.key for one in found] == ["model.init_std"]
        assert [one.setting.key for one in found if one.refused] == refused
