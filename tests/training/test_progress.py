import json

import torch

from megatron_dmtd.training.objectives import make_objective
from megatron_dmtd.training.progress import Progress
from tests.support.tiny import tiny_config

OBJECTIVE = make_objective(tiny_config())


def halfway() -> Progress:
    progress = Progress.new(OBJECTIVE)
    sums = progress.since_log.sums
    sums.copy_(torch.arange(sums.numel(), dtype=torch.float64).reshape(sums.shape) / 3)
    progress.recent_losses = [2.5, 1 / 3]
    progress.bad_steps, progress.evaluation_due, progress.corpus = 2, True, [17, 4321]
    progress.unlogged = [{"step": 3, "loss": 0.1}]
    return progress


def test_progress_travels_through_plain_values_bit_for_bit():
    before = halfway()
    plain = json.loads(json.dumps(before.to_dict()))
    after = Progress.from_dict(plain, OBJECTIVE)
    assert torch.equal(after.since_log.sums, before.since_log.sums) and before.since_log.sums.abs().sum() > 0
    assert after.to_dict() == before.to_dict()


def test_what_is_saved_does_not_change_with_what_goes_on():
    progress = halfway()
    saved = progress.to_dict()
    progress.recent_losses.append(9.0)
    progress.unlogged[0]["loss"] = 9.0
    progress.corpus[0] = 9
    progress.since_log.sums.zero_()
    assert saved == halfway().to_dict()


def test_a_run_that_has_not_begun_has_counted_nothing():
    new = Progress.new(OBJECTIVE)
    assert (new.since_log.num_targets, new.recent_losses, new.corpus, new.unlogged) == (0, [], [], [])
    assert (new.bad_steps, new.evaluation_due) == (0, False)


def test_checkpoints_from_before_lines_could_wait_have_none_waiting():
    values = halfway().to_dict()
    del values["unlogged"]
    assert Progress.from_dict(values, OBJECTIVE).unlogged == []
