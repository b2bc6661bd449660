"""A resumed run is the same run; a checkpoint of another model is refused; nothing half-written is ever named.

Level: bitwise for the same layout. After resharding the sums of a step run in another order: fp32 tolerance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dmtd.config import Config
from megatron_dmtd.errors import CheckpointError
from megatron_dmtd.training.checkpoints import paths
from tests.support.checkpoints import assert_same_checkpoint, tensors_of
from tests.support.ranks import run_ranks
from tests.support.tiny import VARIANTS, tiny_config, with_settings


def train_to(config: Config, steps: int) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Train to `steps`, resuming where there is a checkpoint, and save. Losses of the steps run, final weights, first step."""
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training import rows, start
    from megatron_dmtd.training.checkpoints.checkpoint import save_checkpoint
    from megatron_dmtd.training.step import train_step

    start.check(config, world_size=torch.distributed.get_world_size())
    run = start.prepare(config, prepare_megatron())
    first = run.step
    iterator = rows.microbatches(run, rows.open_corpus(config, config.data.train), first_row=run.rows)
    losses = [train_step(run, iterator).loss.values()["loss"] for _ in range(steps - run.step)]
    if config.checkpoint.dir and run.step > 0:
        save_checkpoint(run, config.checkpoint.dir)
    weights = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
    return losses, weights, first


def _config(corpus: tuple[str, str], folder: Path | str, variant: str = "bidirectional-refresh", **sections: Any) -> Config:
    config = tiny_config(variant, **sections)
    return with_settings(config, data={"train": (corpus[0],), "valid": (corpus[1],)}, checkpoint={"dir": str(folder)})


def _assert_bitwise(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys() and first
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, different


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("world_size", "parallel", "precision"),
    [
        pytest.param(1, {}, "fp32", marks=pytest.mark.slow),  # the quick run has it below
        (2, {"pipeline": 2}, "fp32"),
        (2, {"tensor": 2, "sequence_parallel": True}, "fp32"),
        (2, {}, "fp32"),
        (1, {"distributed_optimizer": False}, "fp32"),
        (1, {}, "bf16"),
    ],
    ids=["one", "pipeline", "tensor", "data", "plain-optimizer", "bf16"],
)
def test_resuming_twice_is_bitwise_the_uninterrupted_run(
    world_size: int, parallel: dict[str, Any], precision: str, corpus: tuple[str, str], tmp_path: Path
) -> None:
    sections = {"parallel": parallel, "training": {"precision": precision}}
    whole = run_ranks(world_size, train_to, _config(corpus, tmp_path / "whole", **sections), 6)
    resumed = _config(corpus, tmp_path / "run", **sections)
    parts = [run_ranks(world_size, train_to, resumed, steps) for steps in (2, 4, 6)]
    assert [part[0][2] for part in parts] == [0, 2, 4]
    for rank in range(world_size):
        assert [loss for part in parts for loss in part[rank][0]] == whole[rank][0]
        _assert_bitwise(parts[-1][rank][1], whole[rank][1])
    assert_same_checkpoint(tmp_path / "run" / "step_00000006", tmp_path / "whole" / "step_00000006")


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "variant", ["bidirectional-refresh", "vanilla", *(pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS[:-1])]
)
def test_every_variant_resumes_bitwise(variant: str, corpus: tuple[str, str], tmp_path: Path) -> None:
    whole = run_ranks(1, train_to, _config(corpus, "", variant), 4)[0]
    first = run_ranks(1, train_to, _config(corpus, tmp_path / "run", variant), 2)[0]
    second = run_ranks(1, train_to, _config(corpus, tmp_path / "run", variant), 4)[0]
    assert first[0] + second[0] == whole[0]
    _assert_bitwise(second[1], whole[1])


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "settings",
    [
        {"tie_word_embeddings": True},
        pytest.param({"tie_word_embeddings": False}, marks=pytest.mark.slow),
        {"normalized": True, "tie_word_embeddings": False, "num_recurrent_layers": 1, "num_loops": 2},
        pytest.param({"num_recurrent_layers": 1, "num_loops": 2, "injection": "concat_linear"}, marks=pytest.mark.slow),
    ],
    ids=["tied", "untied", "normalized", "looped"],
)
def test_a_checkpoint_of_one_layout_resumes_in_another(settings: dict[str, Any], corpus: tuple[str, str], tmp_path: Path) -> None:
    model = {"model": settings}
    whole = run_ranks(1, train_to, _config(corpus, "", **model), 6)[0]
    losses: list[float] = []
    for world_size, parallel, steps in (
        (2, {"tensor": 1, "pipeline": 2}, 2),
        (2, {"tensor": 2, "pipeline": 1}, 3),
        (2, {}, 4),
        (3, {"pipeline": 3, "stage_layers": (2, 1, 1)}, 5),
        (1, {}, 6),
    ):
        found = run_ranks(world_size, train_to, _config(corpus, tmp_path / "run", parallel=parallel, **model), steps)
        losses += found[0][0]
    assert losses == pytest.approx(whole[0], abs=2e-6)


@pytest.mark.multiprocess
def test_state_behind_a_padded_bucket_is_stored_in_its_place(corpus: tuple[str, str], tmp_path: Path) -> None:
    # One parallel layer with an odd number of blocks of 64: the bucket before the shared embedding table ends in padding.
    sections = {"model": {"intermediate_size": 66, "qk_norm": False}, "cycle": {"num_parallel_layers": 1}}
    for name, world_size, parallel in (("one", 1, {}), ("stages", 2, {"pipeline": 2})):
        found = run_ranks(world_size, train_to, _config(corpus, tmp_path / name, parallel=parallel, **sections), 3)
        assert found[0][2] == 0
    one, stages = (tensors_of(tmp_path / name / "step_00000003") for name in ("one", "stages"))
    state = [key for key in one if key.startswith("optimizer.state.") and "embedding" in key]
    assert len(state) == 3  # the fp32 copy and two moments
    for key in one:
        if one[key].is_floating_point():
            assert torch.allclose(stages[key], one[key], rtol=1e-4, atol=1e-5 * float(one[key].abs().max())), key


@pytest.mark.multiprocess
def test_init_from_takes_the_weights_of_another_variant_and_nothing_else(corpus: tuple[str, str], tmp_path: Path) -> None:
    vanilla = run_ranks(1, train_to, _config(corpus, tmp_path / "vanilla", "vanilla"), 3)[0]
    config = with_settings(_config(corpus, tmp_path / "new"), checkpoint={"init_from": str(tmp_path / "vanilla")})
    started = run_ranks(1, train_to, config, 0)[0]
    assert started[2] == 0
    _assert_bitwise(started[1], vanilla[1])


@pytest.mark.multiprocess
def test_a_checkpoint_of_another_model_or_method_is_refused_field_by_field(corpus: tuple[str, str], tmp_path: Path) -> None:
    from megatron_dmtd.platform import prepare_megatron

    prepare_megatron()
    from megatron_dmtd.training.checkpoints.checkpoint import check_resumable, check_weights
    from megatron_dmtd.training.checkpoints.initial import find_initial

    config = _config(corpus, tmp_path / "run")
    run_ranks(1, train_to, config, 1)
    directory = paths.find_step_directory(tmp_path / "run")
    check_resumable(config, directory)
    with pytest.raises(CheckpointError, match=r"model\.intermediate_size = 48 in the checkpoint, 64 in this run"):
        check_resumable(with_settings(config, model={"intermediate_size": 64}), directory)
    with pytest.raises(CheckpointError, match=r"cycle\.variant = bidirectional-refresh in the checkpoint, causal-refresh"):
        check_resumable(with_settings(config, cycle={"variant": "causal-refresh"}), directory)
    check_weights(with_settings(config, cycle={"variant": "causal-refresh"}), find_initial(directory))
    with pytest.raises(CheckpointError, match=r"model\.num_layers = 4 in the checkpoint, 5"):
        check_weights(with_settings(config, model={"num_layers": 5}), find_initial(tmp_path / "run"))


@pytest.mark.multiprocess
def test_old_checkpoints_are_removed_and_a_partial_one_is_never_named(corpus: tuple[str, str], tmp_path: Path) -> None:
    config = with_settings(_config(corpus, tmp_path / "run"), checkpoint={"keep_last": 2})
    leftover = tmp_path / "run" / paths.partial_directory_name(2)
    leftover.mkdir(parents=True)
    (leftover / "__0_0.distcp").write_bytes(b"half")
    for steps in (1, 2, 3):
        run_ranks(1, train_to, config, steps)
    assert [path.name for path in paths.step_directories(tmp_path / "run")] == ["step_00000002", "step_00000003"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["latest", "step_00000002", "step_00000003"]
    assert (tmp_path / "run" / "latest").read_text() == "step_00000003\n"


def _load_or_say_why_not(config: Config) -> str:
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training import start

    try:
        start.prepare(config, prepare_megatron())
    except CheckpointError as error:
        return str(error)
    return "loaded"


@pytest.mark.multiprocess
def test_a_damaged_file_of_any_kind_is_refused_by_name_on_every_rank(corpus: tuple[str, str], tmp_path: Path) -> None:
    config = _config(corpus, tmp_path / "run")
    run_ranks(2, train_to, config, 1)
    directory = paths.find_step_directory(tmp_path / "run")
    names = sorted(path.name for path in directory.iterdir())
    assert len([name for name in names if name.endswith(".distcp")]) >= 2
    assert {".metadata", "checksums.sha256", "common.pt", "config.yaml", "metadata.json"} < set(names)
    for index, name in enumerate(name for name in names if name not in ("checksums.sha256", "config.yaml")):
        path = directory / name
        sound = path.read_bytes()
        flipped = bytearray(sound)
        flipped[len(sound) // 2] ^= 4
        path.write_bytes(bytes(flipped) if index % 2 else sound[:-1])
        found = run_ranks(2, _load_or_say_why_not, config)
        assert found[0] == found[1]
        assert f"{name} (" in found[0] and "is not what was written" in found[0]
        path.write_bytes(sound)
    assert run_ranks(2, _load_or_say_why_not, config) == ["loaded"] * 2


@pytest.mark.multiprocess
def test_weights_without_checksums_are_taken_from_an_import_and_not_from_a_runs_checkpoint(
    corpus: tuple[str, str], tmp_path: Path
) -> None:
    run_ranks(1, train_to, _config(corpus, tmp_path / "run"), 1)
    directory = paths.find_step_directory(tmp_path / "run")
    (directory / paths.CHECKSUMS_FILE).unlink()
    config = with_settings(_config(corpus, tmp_path / "new"), checkpoint={"init_from": str(directory)})
    assert "no checksums.sha256" in run_ranks(1, _load_or_say_why_not, config)[0]
    directory.rename(tmp_path / "imported")
    config = with_settings(config, checkpoint={"init_from": str(tmp_path / "imported")})
    assert run_ranks(1, _load_or_say_why_not, config) == ["loaded"]
    for part in (tmp_path / "imported").glob("*.distcp"):
        part.write_bytes(part.read_bytes()[:100])
    assert "cannot be read" in run_ranks(1, _load_or_say_why_not, config)[0]


@pytest.mark.multiprocess
def test_a_run_changes_its_precision_and_back(corpus: tuple[str, str], tmp_path: Path) -> None:
    steps = []
    for precision, last in (("fp32", 2), ("bf16", 3), ("fp32", 4)):
        config = _config(corpus, tmp_path / "run", training={"precision": precision})
        losses, _, first = run_ranks(1, train_to, config, last)[0]
        steps.append(first)
        assert all(3.0 < loss < 6.0 for loss in losses)
    assert steps == [0, 2, 3]
