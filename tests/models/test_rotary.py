"""Angles of each rotary profile, and a decoder whose layers have different ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron_dmtd.architecture import RopeScaling, RotaryProfile, make_schedule
from megatron_dmtd.config import Config
from megatron_dmtd.config.decoder import decoder_of, method_of
from megatron_dmtd.models.rotary import RotaryAngles
from megatron_dmtd.parallel.placement import place_schedule
from tests.models.families import FAMILIES, LAYERS, megatron_tensors
from tests.oracles.cycled_transformers import teacher_forced_logits
from tests.support.ranks import run_ranks
from tests.support.tiny import MASK, tiny_config

DEFAULT = RotaryProfile(theta=1e4)
DOCUMENTS = (12, 4, 16)


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6, 123456.7])
@pytest.mark.parametrize("width", [8, 64, 128])
def test_default_angles_are_megatrons_bit_for_bit(theta: float, width: int) -> None:
    positions_BN = torch.tensor([[0, 1, 2, 3, 4095, 40959], [0, 1, 0, 1, 2, 3]])
    profile = RotaryProfile(theta=theta)
    table = RotaryEmbedding(width, 1.0, rotary_base=theta, use_cpu_initialization=True)  # type: ignore[arg-type]
    frequencies = table.get_freqs_non_repeated(40960)
    expected = torch.cat((frequencies, frequencies), dim=-1)[positions_BN.t()][:, :, None]
    angles = RotaryAngles([(profile, width)])(positions_BN)[profile, width]
    assert angles.dtype == torch.float32 and angles.shape == (6, 2, 1, width)
    assert torch.equal(angles, expected)


def test_each_profile_has_angles_of_its_own() -> None:
    scaled = RotaryProfile(theta=1e4, scaling=RopeScaling(rope_type="linear", factor=4.0))
    angles = RotaryAngles([(DEFAULT, 8), (scaled, 8), (DEFAULT, 16)])(torch.arange(8)[None])
    assert {key: value.shape[-1] for key, value in angles.items()} == {(DEFAULT, 8): 8, (scaled, 8): 8, (DEFAULT, 16): 16}
    torch.testing.assert_close(angles[scaled, 8], angles[DEFAULT, 8] / 4)


def logits_of(config: Config, scalings: tuple[RopeScaling, ...], own: dict[str, torch.Tensor], tokens_BN: torch.Tensor) -> Any:
    """Logits of a model whose layers' profiles have these scalings. Runs in a rank."""
    from megatron_dmtd.models.model import CycleModel
    from megatron_dmtd.models.transformer_config import transformer_config
    from megatron_dmtd.parallel.groups import init_parallel
    from megatron_dmtd.platform import prepare_megatron

    init_parallel(config, prepare_megatron())
    decoder = decoder_of(config.model)
    layers = tuple(
        replace(layer, attention=replace(layer.attention, rotary=RotaryProfile(theta=1e4, scaling=scaling)))
        for layer, scaling in zip(decoder.layers, scalings, strict=True)
    )
    schedule = make_schedule(replace(decoder, layers=layers), method_of(config.cycle))
    placement = place_schedule(schedule, config.parallel)
    model = CycleModel(config, transformer_config(config, on_cuda=False), placement, placement.stages[0], backend="dense")
    model.load_state_dict({**model.state_dict(), **own})
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    with torch.no_grad():
        return model.eval()(tokens_BN, positions, document_lengths=(DOCUMENTS,))[0]


@pytest.mark.multiprocess
@pytest.mark.parametrize("variant", ["vanilla", "causal-refresh", "bidirectional-norefresh"])
def test_layers_of_one_model_may_rotate_by_different_profiles(variant: str) -> None:
    """YaRN's factor, on queries and on keys, is a layer's own too."""
    names = ("qwen3-yarn", "qwen3-linear", "qwen3-yarn", "qwen3-linear")
    models = {name: FAMILIES[name].build() for name in dict.fromkeys(names)}
    model = models["qwen3-yarn"]
    tokens = torch.randint(1, MASK, (1, sum(DOCUMENTS)), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = teacher_forced_logits(
            model,
            tokens[0].tolist(),
            DOCUMENTS,
            variant=variant,
            num_parallel_layers=0 if variant == "vanilla" else 2,
            mask_token_id=MASK,
            windows=(None,) * LAYERS,
            rotaries=[models[name].model.rotary_emb for name in names],
        )
    config = tiny_config(variant, model={"tie_word_embeddings": False})
    scalings = tuple(FAMILIES[name].settings["rope_scaling"] for name in names)
    own = {name: tensor.float() for name, tensor in megatron_tensors(model.state_dict()).items()}
    found = run_ranks(1, logits_of, config, scalings, own, tokens)[0]
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=0)
    alike = run_ranks(1, logits_of, config, (scalings[0],) * LAYERS, own, tokens)[0]
    assert (alike - found).abs().max() > 0.1
