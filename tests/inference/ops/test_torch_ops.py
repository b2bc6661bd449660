"""Each operation of the torch path against its definition, one head and one key at a time, in float64."""

import pytest
import torch

from megatron_dmtd.architecture.schedule import PARALLEL
from megatron_dmtd.inference.ops.torch_ops import TorchOps
from tests.inference.ops.passes_to_try import SHAPE, Setting, attended, normed, rotated
from tests.oracles.parallel_dmtd import FOUR_VARIANTS

each_kind = pytest.mark.parametrize("kind", FOUR_VARIANTS, ids=["-".join(kind) for kind in FOUR_VARIANTS])
WIDE = {"dtype": torch.float64}


def runs(setting: Setting, pass_name: str):
    """(the pass, its rows in the order of the plan) as it comes, and with a chunk of nobody."""
    num_rows = len(setting.rows(pass_name)[0])
    return [(setting.dynamic(pass_name), num_rows), (setting.static(pass_name, num_chunks=3), num_rows)]


def padded_qkv(setting: Setting, pass_name: str, run) -> torch.Tensor:
    qkv = setting.qkv[pass_name]
    return torch.cat([qkv, torch.ones(len(run.position_R) - len(qkv), qkv.shape[1], dtype=qkv.dtype)])


@each_kind
@pytest.mark.parametrize("shift", [0, -2])
def test_q_and_k_are_normed_and_rotated_by_position_and_k_and_v_stored_at_their_entries(kind, shift):
    """A position need not be an entry's number: cache operations move one and not the other."""
    for number in (0, 1):
        setting = Setting(*kind, **WIDE, shift=shift)
        for pass_name, visit in setting.visits():
            rows, run = setting.rows(pass_name)[0], runs(setting, pass_name)[number][0]
            qkv = padded_qkv(setting, pass_name, run)
            found = TorchOps(run).rotate_and_store(qkv.clone(), visit).view(len(qkv), -1, SHAPE.head_dim)
            before = qkv.view(len(qkv), -1, SHAPE.head_dim)
            for row in range(len(rows)):
                expected = [rotated(normed(head, visit.weights.q_norm.weight), rows.position[row]) for head in before[row, :6]]
                expected += [rotated(normed(head, visit.weights.k_norm.weight), rows.position[row]) for head in before[row, 6:8]]
                torch.testing.assert_close(found[row, :8], torch.stack(expected), rtol=0, atol=1e-12)
                assert torch.equal(found[row, 8:], before[row, 8:])
                if rows.entry[row] >= 0:
                    key, value = setting.entry(visit, rows.chunk[row], rows.entry[row])
                    assert torch.equal(key, found[row, 6:8]) and torch.equal(value, found[row, 8:])


@each_kind
@pytest.mark.parametrize("final_only", [False, True])
def test_every_row_attends_to_exactly_what_the_rule_shows_it(kind, final_only):
    for number in (0, 1):
        setting = Setting(*kind, **WIDE)
        for pass_name, visit in setting.visits():
            rows, final = setting.rows(pass_name)
            run = runs(setting, pass_name)[number][0]
            ops = TorchOps(run)
            qkv = ops.rotate_and_store(padded_qkv(setting, pass_name, run), visit)
            found = ops.attend(qkv, visit, final_only=final_only)
            asked = final if final_only else range(len(rows))
            expected = [attended(setting, pass_name, visit, qkv[: len(rows)], row) for row in asked]
            torch.testing.assert_close(found[: len(asked)], torch.stack(expected), rtol=0, atol=1e-12)
            assert torch.isfinite(found).all()


def test_a_static_pass_leaves_the_pages_of_requests_as_a_plain_one_does():
    dynamic, static = (Setting("real", "bidirectional", **WIDE) for _ in range(2))
    for setting, run_of in ((dynamic, dynamic.dynamic), (static, lambda name: static.static(name, num_chunks=3))):
        for pass_name, visit in setting.visits():
            run = run_of(pass_name)
            TorchOps(run).rotate_and_store(padded_qkv(setting, pass_name, run), visit)
    for (pass_name, one), (_, other) in zip(dynamic.visits(), static.visits()):
        assert torch.equal(one.pages.k_PGDT[:12], other.pages.k_PGDT[:12])
        assert torch.equal(one.pages.v_PGTD[:12], other.pages.v_PGTD[:12])
        if pass_name == PARALLEL:
            assert not torch.equal(one.pages.v_PGTD[12:], other.pages.v_PGTD[12:])
