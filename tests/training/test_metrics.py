import math

import pytest
import torch

from megatron_dmtd.training.metrics import PhaseLoss

POSITIONS_BN = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])


def microbatch(loss, mask, positions_BN=POSITIONS_BN):
    return {"loss_BN": torch.tensor([loss]), "loss_mask_BN": torch.tensor([mask]), "positions_BN": positions_BN}


def test_losses_are_sorted_by_phase():
    phases = PhaseLoss(4)
    phases.add(**microbatch([1.0, 2.0, 3.0, 4.0, 3.0, 4.0, 5.0, 6.0], [1.0] * 8))
    assert phases.values() == {
        "loss": 3.5,
        "loss_phase_0": 2.0,
        "loss_phase_1": 3.0,
        "loss_phase_2": 4.0,
        "loss_phase_3": 5.0,
    }
    assert phases.num_targets == 8


def test_masked_slots_do_not_count():
    phases = PhaseLoss(4)
    phases.add(**microbatch([1.0, 2.0, 3.0, 4.0, 9.0, 9.0, 9.0, 9.0], [1.0] * 4 + [0.0] * 4))
    assert phases.values()["loss"] == 2.5
    assert phases.num_targets == 4


def test_phases_without_a_target_are_left_out():
    phases = PhaseLoss(4)
    phases.add(**microbatch([1.0, 2.0, 3.0, 4.0] * 2, [1.0, 1.0, 0.0, 0.0] * 2))
    assert phases.values() == {"loss": 1.5, "loss_phase_0": 1.0, "loss_phase_1": 2.0}


def test_nothing_counted_gives_no_values_and_no_nan():
    phases = PhaseLoss(4)
    phases.add(**microbatch([1.0] * 8, [0.0] * 8))
    assert phases.values() == {}


def test_microbatches_combine_by_sums_not_by_means():
    first, second = PhaseLoss(4), PhaseLoss(4)
    first.add(**microbatch([1.0] * 8, [1.0] * 8))
    second.add(**microbatch([10.0] * 8, [1.0] + [0.0] * 7))
    mean_of_means = (first.values()["loss"] + second.values()["loss"]) / 2
    first.sums.add_(second.sums)
    assert first.values()["loss"] == pytest.approx(2.0)
    assert mean_of_means == 5.5
    assert first.values()["loss_phase_0"] == pytest.approx(4.0)
    assert first.values()["loss_phase_1"] == 1.0


def test_adding_in_turn_equals_merging():
    batches = [microbatch([float(i + j) for j in range(8)], [1.0] * (8 - i) + [0.0] * i) for i in range(3)]
    together, merged = PhaseLoss(4), PhaseLoss(4)
    for batch in batches:
        together.add(**batch)
        one = PhaseLoss(4)
        one.add(**batch)
        merged.sums.add_(one.sums)
    assert torch.equal(together.sums_2C, merged.sums_2C)


def test_counts_stay_exact_beyond_float32():
    phases = PhaseLoss(1)
    phases.sums_2C[1, 0] = 2.0**24
    phases.add(loss_BN=torch.ones(1, 1), loss_mask_BN=torch.ones(1, 1), positions_BN=torch.zeros(1, 1, dtype=torch.int64))
    assert phases.num_targets == 2**24 + 1


def test_a_nan_at_a_target_is_shown():
    phases = PhaseLoss(4)
    phases.add(**microbatch([math.nan] + [1.0] * 7, [1.0] * 8))
    assert math.isnan(phases.values()["loss"])
    assert phases.values()["loss_phase_1"] == 1.0


def test_reset_and_prefix():
    phases = PhaseLoss(1)
    phases.add(**microbatch([1.0] * 8, [1.0] * 8))
    assert phases.values(prefix="valid_") == {"valid_loss": 1.0, "valid_loss_phase_0": 1.0}
    phases.sums.zero_()
    assert phases.values() == {}


def test_shapes_must_agree():
    with pytest.raises(AssertionError, match="Size"):
        PhaseLoss(4).add(**microbatch([1.0] * 8, [1.0] * 8, POSITIONS_BN[:, :4]))
    with pytest.raises(RuntimeError, match="size"):
        PhaseLoss(4).sums.add_(PhaseLoss(2).sums)
