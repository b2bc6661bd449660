import dataclasses

import pytest
import torch

from megatron_dmtd.architecture import RotaryProfile, make_schedule
from megatron_dmtd.architecture.rotary import rotary_tables
from megatron_dmtd.architecture.schedule import PARALLEL, SEQUENTIAL
from megatron_dmtd.families import hf_name
from megatron_dmtd.inference import Engine, EngineConfig
from megatron_dmtd.inference.ops.native_ops import NativeOps
from megatron_dmtd.inference.ops.torch_ops import TorchOps
from megatron_dmtd.inference.weights import build_model
from tests.inference.ops.passes_to_try import SHAPE, Setting
from tests.inference.oracle_models import YARN, decoder_of, method_of, model_of
from tests.oracles.parallel_dmtd import FOUR_VARIANTS, Shape, random_weights

KIND = ("real", "bidirectional")


def test_every_visit_works_on_its_layer_and_its_place_in_the_store():
    setting = Setting(*KIND)
    visits = setting.forward.visits
    assert [visit.weights for visit in (*visits[PARALLEL], *visits[SEQUENTIAL])] == list(setting.model.layers)
    assert [visit.group for visit in visits[PARALLEL]] == ["parallel/window-18/2x16", "parallel/window-3/2x16"]
    for pass_name in (PARALLEL, SEQUENTIAL):
        for visit, bound in zip(setting.schedule.pass_visits(pass_name), visits[pass_name]):
            assert bound.pages is setting.store.groups[visit.kv_group].places[visit.kv_place]
    assert len({id(visit.pages) for visit in (*visits[PARALLEL], *visits[SEQUENTIAL])}) == 4
    assert len({id(visit.rotary) for visit in (*visits[PARALLEL], *visits[SEQUENTIAL])}) == 1


def test_passes_are_computed_in_c_where_that_is_wanted_and_static_ones_in_torch():
    setting = Setting(*KIND)
    assert isinstance(setting.forward.ops(setting.dynamic(PARALLEL)), NativeOps)
    assert isinstance(setting.forward.ops(setting.static(PARALLEL)), TorchOps)
    wide = Setting(*KIND, dtype=torch.float64)
    assert wide.forward.native is None
    assert isinstance(wide.forward.ops(wide.dynamic(PARALLEL)), TorchOps)


@pytest.mark.parametrize("kind", FOUR_VARIANTS, ids=["-".join(kind) for kind in FOUR_VARIANTS])
def test_rows_that_do_not_leave_a_pass_end_at_the_last_visits_k_and_v(kind):
    whole, cut = Setting(*kind, dtype=torch.float64), Setting(*kind, dtype=torch.float64)
    run = cut.dynamic(SEQUENTIAL)
    assert not run.ends_early
    logits_FV = whole.forward.logits(whole.dynamic(SEQUENTIAL), None)
    for final in ([1], []):
        run.final = final
        run.__dict__.pop("final_R", None)
        run.__dict__.pop("final_members", None)
        run.addresses("sequential/full/2x16")._batches.clear()
        run.addresses("sequential/window-5/2x16")._batches.clear()
        found = cut.forward.logits(run, None)
        torch.testing.assert_close(found, logits_FV[final], rtol=0, atol=1e-12)
    for one, other in zip(whole.store.groups.values(), cut.store.groups.values()):
        for place, other_place in zip(one.places, other.places):
            assert torch.equal(place.k_PGDT, other_place.k_PGDT)


def test_what_a_parallel_pass_has_left_is_found_by_slot_and_phase():
    setting = Setting(*KIND, starts=(5, 18))
    setting.forward.kept_SCX.copy_(torch.arange(3 * 4 * 40.0).view(3, 4, 40))
    kept_RX = setting.forward.kept(setting.dynamic(SEQUENTIAL))
    assert torch.equal(kept_RX, setting.forward.kept_SCX[[0, 1], [1, 2]])


def test_a_schedule_without_a_parallel_pass_keeps_nothing():
    shape = Shape(**{**{name: getattr(SHAPE, name) for name in SHAPE.__dataclass_fields__}, "num_parallel_layers": 0})
    engine = Engine(model_of(shape, random_weights(shape, seed=1)), EngineConfig(max_batch=1))
    assert list(engine.runner.forward.visits[PARALLEL]) == []
    assert engine.runner.forward.kept(None) is None


def test_each_layer_is_rotated_by_its_own_profile():
    long = RotaryProfile(theta=1e6, scaling=YARN)
    plain = decoder_of(SHAPE)
    layers = tuple(
        dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, rotary=long)) if index in (1, 2) else layer
        for index, layer in enumerate(plain.layers)
    )
    schedule = make_schedule(dataclasses.replace(plain, layers=layers), method_of(SHAPE, *KIND))
    weights = random_weights(SHAPE, seed=1)
    engine = Engine(build_model(schedule, lambda name: weights[hf_name(name, schedule.decoder)]), EngineConfig(max_batch=1))
    visits = [visit for name in (PARALLEL, SEQUENTIAL) for visit in engine.runner.forward.visits[name]]
    assert visits[0].rotary is visits[3].rotary and visits[1].rotary is visits[2].rotary
    for visit, profile in zip(visits, (plain.layers[0].attention.rotary, long, long, plain.layers[0].attention.rotary)):
        cos_ND, sin_ND = rotary_tables(torch.arange(7), profile, 16, torch.float32)
        assert torch.equal(visit.rotary.cos_ND[:7], cos_ND) and torch.equal(visit.rotary.sin_ND[:7], sin_ND)
    assert not torch.equal(visits[0].rotary.cos_ND, visits[1].rotary.cos_ND)
