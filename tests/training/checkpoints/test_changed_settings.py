"""What a resume announces, it does: what a resumed run may change has its effect in the next step and in the next save.

The next step is computed again from the tensors of the checkpoints: AdamW in float64, from the moments before the step and the
gradient of a run that changed nothing, which is the same because the weights and rows are. Settings that "say how the run works"
or "only measure" must leave every bit of the next save as it is.

Level: the oracle agrees to 2e-5 of the largest update (fp32 moments give the gradient to about 1e-6) and a rounding of the
weight; bits elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dmtd.config import Config, from_yaml
from megatron_dmtd.config.metadata import settings
from megatron_dmtd.errors import CheckpointError
from megatron_dmtd.training.checkpoints import paths
from megatron_dmtd.training.checkpoints.compatibility import check_resumable
from tests.support.checkpoints import common_of, same, tensors_of
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config, with_settings

pytestmark = pytest.mark.multiprocess

_MOMENT = "optimizer.state.exp_avg."
#: fp32 copies of weights in bf16, with the distributed optimizer and without
_COPIES = ("optimizer.state.param.", "optimizer.state.fp32_param.")
#: a run of two steps is resumed with these changes, and makes one more
SAVED = 2
OPTIMIZER: dict[str, dict[str, dict[str, Any]]] = {
    "optimizer.lr": {"optimizer": {"lr": 0.02}},
    "optimizer.min_lr": {"optimizer": {"min_lr": 2e-3}},
    "optimizer.warmup_steps": {"optimizer": {"warmup_steps": 4}},
    "optimizer.decay": {"optimizer": {"decay": "linear"}},
    "optimizer.decay_steps": {"optimizer": {"decay_steps": 5}},
    "optimizer.wsd_decay_steps": {"optimizer": {"decay": "WSD", "wsd_decay_steps": 4}},
    "optimizer.wsd_decay_style": {"optimizer": {"decay": "WSD", "wsd_decay_steps": 5, "wsd_decay_style": "minus_sqrt"}},
    "optimizer.weight_decay": {"optimizer": {"weight_decay": 5.0}},
    "optimizer.beta1": {"optimizer": {"beta1": 0.5}},
    "optimizer.beta2": {"optimizer": {"beta2": 0.5}},
    "optimizer.eps": {"optimizer": {"eps": 1e-2}},
    "optimizer.clip_grad": {"optimizer": {"clip_grad": 0.05}},
    "training.steps": {"training": {"steps": 12}},
    "several": {
        "optimizer": {"lr": 0.01, "min_lr": 0.0, "beta1": 0.7, "beta2": 0.8, "eps": 1e-4, "weight_decay": 2.0, "clip_grad": 0.0}
    },
}
#: processes, and settings by section
LAYOUTS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "one": (1, {}),
    "tensor": (2, {"parallel": {"tensor": 2}}),
    "sequence": (2, {"parallel": {"tensor": 2, "sequence_parallel": True}}),
    "pipeline": (2, {"parallel": {"pipeline": 2}}),
    "virtual": (2, {"parallel": {"pipeline": 2, "virtual_stages": 2}}),
    "data": (2, {}),
    # fp32 copies of the weights, which another class of Megatron's keeps
    "bf16": (1, {"training": {"precision": "bf16"}}),
    "bf16-data": (2, {"training": {"precision": "bf16"}}),
    "frozen": (2, {"parallel": {"pipeline": 2}, "training": {"freeze_embeddings": True}}),
}
#: in the quick run every layout of weights and both optimizers occur, not every pair of them
QUICK = {("one", True), ("one", False), ("tensor", True), ("pipeline", False), ("data", True), ("bf16", False)}
PAIRS = [
    pytest.param(layout, flag, id=f"{layout}-{name}", marks=[] if (layout, flag) in QUICK else pytest.mark.slow)
    for layout in LAYOUTS
    for name, flag in (("distributed", True), ("plain", False))
]


def _lr(config: Config, step: int) -> float:
    """The schedule, written down again: the rate of the step after `step` finished ones."""
    ours, end = config.optimizer, config.optimizer.decay_steps or config.training.steps
    if step <= ours.warmup_steps:
        return ours.lr * step / ours.warmup_steps
    if ours.decay == "WSD":
        begun = max(0.0, (step - (end - ours.wsd_decay_steps)) / ours.wsd_decay_steps)
        share = 1 - math.sqrt(begun) if ours.wsd_decay_style == "minus_sqrt" else (1 + math.cos(math.pi * begun)) / 2
    else:
        done = (step - ours.warmup_steps) / (end - ours.warmup_steps)
        share = 1 - done if ours.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return ours.min_lr + share * (ours.lr - ours.min_lr)


def _config(corpus: tuple[str, str], **sections: Any) -> Config:
    config = tiny_config(training={"steps": 6}, optimizer={"warmup_steps": 1, "clip_grad": 0.4}, data={"train": (corpus[0],)})
    return with_settings(config, **sections)


def _session(config: Config, changes: Mapping[str, Mapping[str, Any]], root: str) -> dict[str, float]:
    """Save after two steps; for each change, resume there with it, make one step and save. Gradient norms by change."""
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training import rows, start
    from megatron_dmtd.training.checkpoints.checkpoint import load_checkpoint, save_checkpoint
    from megatron_dmtd.training.setup import build_run
    from megatron_dmtd.training.step import train_step

    platform = prepare_megatron()
    run = start.prepare(config, platform)
    corpus = rows.open_corpus(config, config.data.train)
    iterator = rows.microbatches(run, corpus, first_row=0)
    for _ in range(SAVED):
        train_step(run, iterator)
    saved = save_checkpoint(run, Path(root) / "saved")
    norms = {}
    for name, sections in changes.items():
        run = build_run(with_settings(config, **sections), platform)
        load_checkpoint(run, saved)
        result = train_step(run, rows.microbatches(run, corpus, first_row=run.rows))
        assert result.is_applied
        norms[name] = result.grad_norm
        save_checkpoint(run, Path(root) / name)
    return norms


def _weights(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The fp32 weights that the optimizer updates, by name: copies of those in bf16."""
    updated = {name.removeprefix(_MOMENT) for name in tensors if name.startswith(_MOMENT)}
    copies = {name: copy for copy in tensors for name in updated if copy in (f"{kind}{name}" for kind in _COPIES)}
    return {name: tensors[copies.get(name, name)].double() for name in updated}


def _gradients(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], *, beta1: float) -> dict[str, torch.Tensor]:
    """What a step whose first moments are known must have seen, after clipping."""
    return {
        name: (after[_MOMENT + name].double() - beta1 * before[_MOMENT + name].double()) / (1 - beta1)
        for name in _weights(before)
    }


def _scale(norm: float, clip: float) -> float:
    return min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0


def _assert_adamw(
    config: Config, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]
) -> None:
    """One step of AdamW with the configuration's values leads from one checkpoint to the next."""
    ours, step = config.optimizer, SAVED + 1
    lr, weights, found = _lr(config, SAVED), _weights(before), _weights(after)
    for name, gradient in gradients.items():
        first = ours.beta1 * before[_MOMENT + name].double() + (1 - ours.beta1) * gradient
        second = ours.beta2 * before[f"optimizer.state.exp_avg_sq.{name}"].double() + (1 - ours.beta2) * gradient**2
        decay = 0.0 if "layernorm" in name else ours.weight_decay
        denominator = (second / (1 - ours.beta2**step)).sqrt() + ours.eps
        expected = weights[name] * (1 - lr * decay) - lr / (1 - ours.beta1**step) * first / denominator
        moved = float((expected - weights[name]).abs().max())
        assert moved > 0, name
        # Where the gradient is all but zero, a rounding of it decides the sign of the update.
        is_certain = gradient.abs() > 1e-5 * gradient.abs().max()
        assert is_certain.float().mean() > 0.5
        difference = ((expected - found[name]).abs() * is_certain).max()
        rounding = 1.2e-7 * float(weights[name].abs().max())
        assert float(difference) <= 2e-5 * max(moved, lr) + rounding, (name, float(difference), moved)


def _groups(common: Mapping[str, Any]) -> list[dict[str, Any]]:
    state = common["optimizer"]
    groups: list[dict[str, Any]] = state["optimizer"]["param_groups"] if "optimizer" in state else state["param_groups"]
    return groups


def _assert_saved_values(config: Config, directory: Path) -> None:
    """The next save holds the configuration's values, in each place that a later resume might read."""
    ours, common = config.optimizer, common_of(directory)
    assert from_yaml(directory / paths.CONFIG_FILE).optimizer == ours
    groups = _groups(common)
    assert [group["wd_mult"] for group in groups] == [1.0, 0.0]
    for group in groups:
        assert (group["max_lr"], group["min_lr"], group["eps"]) == (ours.lr, ours.min_lr, ours.eps)
        assert tuple(group["betas"]) == (ours.beta1, ours.beta2)
        assert group["weight_decay"] == ours.weight_decay * group["wd_mult"]
        assert group["lr"] == pytest.approx(_lr(config, SAVED + 1), rel=1e-9)
        assert group["step"] == SAVED + 1
    scheduler = common["scheduler"]
    assert (scheduler["max_lr"], scheduler["min_lr"], scheduler["end_wd"]) == (ours.lr, ours.min_lr, ours.weight_decay)
    assert (scheduler["lr_warmup_steps"], scheduler["lr_decay_style"]) == (ours.warmup_steps, ours.decay)
    assert scheduler["lr_decay_steps"] == (ours.decay_steps or config.training.steps)
    assert scheduler["num_steps"] == SAVED + 1


def test_every_setting_of_the_optimizer_is_tried() -> None:
    may_change = {one.key for one in settings(Config) if one.resume.may_change}
    tried = (OPTIMIZER.keys() - {"several"}) | {"optimizer.unit_weights"}
    assert {key for key in may_change if key.startswith("optimizer.")} | {"training.steps"} == tried


def test_unit_weights_may_be_given_up_and_the_next_step_follows(corpus: tuple[str, str], tmp_path: Path) -> None:
    config = _config(corpus, model={"normalized": True, "tie_word_embeddings": False}, cycle={"variant": "vanilla"})
    run_ranks(1, _session, config, {"on": {}, "off": {"optimizer": {"unit_weights": False}}}, str(tmp_path))
    lengths = {}
    for name, step in (("saved", 2), ("on", 3), ("off", 3)):
        weights = tensors_of(tmp_path / name / f"step_{step:08d}")["decoder.layers.self_attention.linear_qkv.weight"]
        lengths[name] = (weights.double().norm(dim=-1) - 1).abs().max()
    assert lengths["saved"] < 1e-6 and lengths["on"] < 1e-6 and lengths["off"] > 1e-5, lengths


@pytest.mark.parametrize(("layout", "is_distributed"), PAIRS)
def test_the_next_step_and_the_next_save_follow_the_optimizers_settings(
    layout: str, is_distributed: bool, corpus: tuple[str, str], tmp_path: Path
) -> None:
    world_size, sections = LAYOUTS[layout]
    config = _config(corpus, **sections)
    config = with_settings(config, parallel={"distributed_optimizer": is_distributed})
    norms = run_ranks(world_size, _session, config, {"same": {}} | OPTIMIZER, str(tmp_path))[0]
    assert norms.keys() == {"same", *OPTIMIZER}
    assert {norms[name] for name in OPTIMIZER} == {norms["same"]} and norms["same"] > config.optimizer.clip_grad
    before = tensors_of(tmp_path / "saved" / "step_00000002")
    unchanged = tensors_of(tmp_path / "same" / "step_00000003")
    clipped = _gradients(before, unchanged, beta1=config.optimizer.beta1)
    scale = _scale(norms["same"], config.optimizer.clip_grad)
    for name, sections in OPTIMIZER.items():
        changed, directory = with_settings(config, **sections), tmp_path / name / "step_00000003"
        after = tensors_of(directory)
        factor = _scale(norms["same"], changed.optimizer.clip_grad) / scale
        _assert_adamw(changed, before, after, {key: factor * gradient for key, gradient in clipped.items()})
        _assert_saved_values(changed, directory)
        assert any(not torch.equal(after[key], unchanged[key]) for key in after), f"{name} changed nothing"


#: settings that must leave the next step as it is, to the last bit
SAME_BITS: dict[str, dict[str, dict[str, Any]]] = {
    "model.family": {"model": {"family": "qwen3"}},
    "model.max_position_embeddings": {"model": {"max_position_embeddings": 256}},
    "model.init_std": {"model": {"init_std": 0.5}},
    "parallel.overlap_grad_reduce": {"parallel": {"overlap_grad_reduce": True}},
    "parallel.overlap_param_gather": {"parallel": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
    "parallel.recompute": {"parallel": {"recompute": "full"}},
    "parallel.timeout_s": {"parallel": {"timeout_s": 90.0}},
    "data.train": {},
    "data.valid": {},
    "data.tokenizer": {"data": {"tokenizer": "elsewhere"}},
    "data.add_bos": {"data": {"add_bos": "no"}},
    "data.cache_dir": {},
    "data.prefetch_batches": {"data": {"prefetch_batches": 0}},
    "training.seed": {"training": {"seed": 7}},
    "training.eval_interval": {"training": {"eval_interval": 3}},
    "training.eval_at_start": {"training": {"eval_at_start": True}},
    "training.eval_batches": {"training": {"eval_batches": 1}},
    "training.max_bad_steps": {"training": {"max_bad_steps": 3}},
    "training.watchdog_s": {"training": {"watchdog_s": 60.0}},
    "checkpoint.dir": {},
    "checkpoint.interval": {"checkpoint": {"interval": 1}},
    "checkpoint.keep_last": {"checkpoint": {"keep_last": 1}},
    "checkpoint.keep_every": {"checkpoint": {"keep_every": 2}},
    "checkpoint.asynchronous": {"checkpoint": {"asynchronous": False}},
    "checkpoint.resume": {"checkpoint": {"resume": False}},
    "checkpoint.init_from": {"checkpoint": {"init_from": "elsewhere"}},
    "logging.dir": {"logging": {"dir": "elsewhere"}},
    "logging.interval": {"logging": {"interval": 2}},
    "logging.wandb_project": {"logging": {"wandb_project": "project"}},
    "logging.run_name": {"logging": {"run_name": "name"}},
    "logging.peak_tflops": {"logging": {"peak_tflops": 1.0}},
    "logging.measure_peak": {"logging": {"measure_peak": True}},
    "logging.progress": {"logging": {"progress": True}},
    "logging.spike_deviations": {"logging": {"spike_deviations": 1.0}},
}
#: settings under which sums of the next step run in another order, with the processes that they need
SAME_TO_ROUNDING: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "parallel.tensor": (2, {"parallel": {"tensor": 2}}),
    "parallel.pipeline": (2, {"parallel": {"pipeline": 2}}),
    "parallel.virtual_stages": (2, {"parallel": {"pipeline": 2, "virtual_stages": 2}}),
    "parallel.stage_layers": (3, {"parallel": {"pipeline": 3, "stage_layers": (1, 1, 2)}}),
    "parallel.sequence_parallel": (2, {"parallel": {"tensor": 2, "sequence_parallel": True}}),
    "parallel.attention_backend": (1, {"parallel": {"attention_backend": "masked"}}),
    "training.deterministic": (1, {"training": {"deterministic": False}}),
    "training.micro_batch_size": (1, {"training": {"micro_batch_size": 2}}),
}
#: settings with tests of their own; context parallelism is not built
OTHERS = {
    "training.global_batch_size", "training.rampup_batch_size", "training.precision", "parallel.context",
    "model.num_loops", "model.recurrent_kv_cache_mode", "optimizer.unit_weights",
}  # fmt: skip


def test_every_setting_that_may_change_is_tried() -> None:
    may_change = {one.key for one in settings(Config) if one.resume.may_change}
    tried = [*(OPTIMIZER.keys() - {"several"}), *SAME_BITS, *SAME_TO_ROUNDING, *OTHERS]
    assert sorted(tried) == sorted(may_change)


def test_another_number_of_loops_makes_another_step_and_another_cache_none(corpus: tuple[str, str], tmp_path: Path) -> None:
    loop = {"num_input_layers": 1, "num_recurrent_layers": 2, "num_loops": 2, "injection": "add"}
    config = _config(corpus, model=loop, cycle={"variant": "vanilla"})
    changes = {"same": {}, "more": {"model": {"num_loops": 3}}, "cache": {"model": {"recurrent_kv_cache_mode": "last_loop"}}}
    run_ranks(1, _session, config, changes, str(tmp_path))
    found = {name: tensors_of(tmp_path / name / "step_00000003") for name in changes}
    assert all(torch.equal(found["cache"][key], tensor) for key, tensor in found["same"].items())
    assert any(not torch.equal(found["more"][key], tensor) for key, tensor in found["same"].items())
    for name, sections in changes.items():
        assert from_yaml(tmp_path / name / "step_00000003" / paths.CONFIG_FILE) == with_settings(config, **sections)


def _differing(sections: dict[str, Any], corpus: tuple[str, str], tmp_path: Path, name: str) -> dict[str, Any]:
    """The change itself; for folders and corpora, one that exists."""
    folder = {"data.cache_dir": {"data": {"cache_dir": str(tmp_path / "cache")}}, "data.valid": {"data": {"valid": (corpus[1],)}}}
    moved = Path(corpus[0]).with_name("moved")
    if name == "data.train":
        for suffix in (".bin", ".idx"):
            moved.with_suffix(suffix).write_bytes(Path(corpus[0]).with_suffix(suffix).read_bytes())
        return {"data": {"train": (str(moved),)}}
    if name == "checkpoint.dir":
        return {"checkpoint": {"dir": str(tmp_path / "elsewhere")}}
    return folder.get(name, sections)


@pytest.mark.parametrize(
    ("ranks", "is_distributed"),
    [(1, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, False), (2, True), (2, False)))],
)
def test_what_only_says_how_a_run_works_leaves_every_bit_of_the_next_save(
    ranks: int, is_distributed: bool, corpus: tuple[str, str], tmp_path: Path
) -> None:
    config = with_settings(_config(corpus), parallel={"distributed_optimizer": is_distributed})
    changes = {name: _differing(sections, corpus, tmp_path, name) for name, sections in SAME_BITS.items()}
    if not is_distributed:
        del changes["parallel.overlap_param_gather"]  # which is of the distributed optimizer
    assert all(with_settings(config, **sections) != config for sections in changes.values())
    run_ranks(ranks, _session, config, {"same": {}} | changes, str(tmp_path))
    unchanged = tensors_of(tmp_path / "same" / "step_00000003")
    for name, sections in changes.items():
        directory = tmp_path / name / "step_00000003"
        found = tensors_of(directory)
        assert found.keys() == unchanged.keys() and all(torch.equal(found[key], unchanged[key]) for key in found), name
        assert same(common_of(directory), common_of(tmp_path / "same" / "step_00000003")), name
        assert from_yaml(directory / paths.CONFIG_FILE) == with_settings(config, **sections), name


def _one_more(config: Config, saved: str, root: str) -> tuple[float, int]:
    """Resume with this configuration, make one step and save. Loss, and rows consumed."""
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training import rows, start
    from megatron_dmtd.training.checkpoints.checkpoint import load_checkpoint, save_checkpoint
    from megatron_dmtd.training.step import train_step

    run = start.prepare(config, prepare_megatron())
    load_checkpoint(run, Path(saved))
    corpus = rows.open_corpus(config, config.data.train)
    result = train_step(run, rows.microbatches(run, corpus, first_row=run.rows))
    save_checkpoint(run, root)
    return result.loss.values()["loss"], run.rows


@pytest.mark.parametrize(
    ("name", "is_distributed"),
    [
        pytest.param(name, flag, id=f"{name}-{'distributed' if flag else 'plain'}", marks=[] if is_quick else pytest.mark.slow)
        for name in SAME_TO_ROUNDING
        for flag, is_quick in ((True, True), (False, name in ("parallel.tensor", "parallel.pipeline")))
    ],
)
def test_another_layout_makes_the_same_next_step_up_to_rounding(
    name: str, is_distributed: bool, corpus: tuple[str, str], tmp_path: Path
) -> None:
    world_size, sections = SAME_TO_ROUNDING[name]
    config = with_settings(_config(corpus), parallel={"distributed_optimizer": is_distributed})
    run_ranks(1, _session, config, {"same": {}}, str(tmp_path))
    saved = tmp_path / "saved" / "step_00000002"
    changed = with_settings(config, **sections)
    run_ranks(world_size, _one_more, changed, str(saved), str(tmp_path / "changed"))
    directory = tmp_path / "changed" / "step_00000003"
    before, unchanged, found = tensors_of(saved), tensors_of(tmp_path / "same" / "step_00000003"), tensors_of(directory)
    for key, value in unchanged.items():
        if key.startswith("optimizer.state.exp_avg"):
            assert torch.allclose(found[key], value, rtol=1e-4, atol=1e-6 * float(value.abs().max())), key
            assert not torch.equal(found[key], before[key]), key
    assert from_yaml(directory / paths.CONFIG_FILE) == changed


@pytest.mark.parametrize(
    ("sections", "num_rows"),
    [
        ({"training": {"global_batch_size": 2}}, 2),
        # After 8 rows of a ramp from 1 to 8 in steps of 1 over 28 rows, the step has 3 rows.
        ({"training": {"global_batch_size": 8, "rampup_batch_size": (1, 1, 28)}}, 3),
    ],
    ids=["training.global_batch_size", "training.rampup_batch_size"],
)
def test_another_batch_size_takes_the_rows_that_come_next(
    sections: dict[str, Any], num_rows: int, corpus: tuple[str, str], tmp_path: Path
) -> None:
    config = _config(corpus)
    run_ranks(1, _session, config, {}, str(tmp_path))
    saved = tmp_path / "saved" / "step_00000002"
    assert common_of(saved)["progress"]["rows"] == 8
    changed = with_settings(config, **sections)
    ((loss, rows_after),) = run_ranks(1, _one_more, changed, str(saved), str(tmp_path / "changed"))
    assert rows_after == 8 + num_rows
    assert common_of(tmp_path / "changed" / "step_00000003")["progress"]["rows"] == 8 + num_rows
    ((expected, _),) = run_ranks(
        1,
        _one_more,
        with_settings(config, training={"global_batch_size": num_rows}),
        str(saved),
        str(tmp_path / "other"),
    )
    assert loss == pytest.approx(expected, abs=1e-6)


def test_another_precision_computes_in_it_and_saves_fp32_copies(corpus: tuple[str, str], tmp_path: Path) -> None:
    config = _config(corpus)
    run_ranks(1, _session, config, {"same": {}}, str(tmp_path))
    saved, changed = tmp_path / "saved" / "step_00000002", with_settings(config, training={"precision": "bf16"})
    run_ranks(1, _one_more, changed, str(saved), str(tmp_path / "changed"))
    found = tensors_of(tmp_path / "changed" / "step_00000003")
    unchanged = tensors_of(tmp_path / "same" / "step_00000003")
    assert {value.dtype for key, value in found.items() if not key.startswith("optimizer.")} == {torch.bfloat16}
    copies = {key: value for key, value in found.items() if key.startswith("optimizer.state.param.")}
    assert copies and {value.dtype for value in copies.values()} == {torch.float32}
    for key, value in copies.items():
        assert not torch.equal(value, unchanged[key]) and torch.allclose(value, unchanged[key], atol=5e-3), key


def test_what_may_not_change_is_refused(corpus: tuple[str, str], tmp_path: Path) -> None:
    config = _config(corpus)
    run_ranks(1, _session, config, {}, str(tmp_path))
    with pytest.raises(CheckpointError, match=r"data.shuffle_seed = 1234 in the checkpoint, 7 in this run"):
        check_resumable(with_settings(config, data={"shuffle_seed": 7}), tmp_path / "saved" / "step_00000002")
