"""Training forward and cycled decoding against an implementation that shares no code with them."""

import pytest
import torch

from megatron_dmtd.architecture import RopeScaling, RotaryProfile
from megatron_dmtd.architecture.rotary import attention_factor, inverse_frequencies
from megatron_dmtd.hf import DMTDQwen3Config, DMTDQwen3ForCausalLM
from tests.hf.tiny import decoded_logits
from tests.oracles.parallel_dmtd import FOUR_VARIANTS, Shape, cycled_decode, random_weights, teacher_forced_logits

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
YARN_PROFILE = RotaryProfile(theta=10_000.0, scaling=RopeScaling(**YARN))
SHAPES = {
    "qwen3": Shape(num_layers=4, num_parallel_layers=2),
    "llama": Shape(
        num_layers=3, num_parallel_layers=1, qk_norm=False, tie_word_embeddings=False, cycle_length=3, mask_token_id=7
    ),
    "qwen2 with windows": Shape(num_layers=5, num_parallel_layers=3, qk_norm=False, qkv_bias=True, windows=(3, None, 3, 3, None)),
    "all biases, one window, yarn": Shape(
        num_parallel_layers=2,
        qkv_bias=True,
        output_bias=True,
        windows=(6,) * 4,
        frequencies=tuple(inverse_frequencies(YARN_PROFILE, 8).tolist()),
        rope_factor=attention_factor(YARN_PROFILE.scaling),
    ),
}
IDS = [11, 4, 59, 23, 8, 8, 42, 17, 30, 5, 51, 2, 36]
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
each_kind = pytest.mark.parametrize(("history", "block_attention"), FOUR_VARIANTS, ids=["-".join(kind) for kind in FOUR_VARIANTS])
#: Float64 sums in another order, on logits of a few units.
TOLERANCE = 1e-12


def windows_of(shape: Shape) -> dict:
    widths = {window for window in shape.windows if window is not None}
    if not widths:
        return {}
    kinds = ["full_attention" if window is None else "sliding_attention" for window in shape.windows]
    return {"use_sliding_window": True, "sliding_window": widths.pop(), "layer_types": kinds}


def model_of(shape: Shape, weights: dict[str, torch.Tensor], history: str, block_attention: str) -> DMTDQwen3ForCausalLM:
    config = DMTDQwen3Config(
        mtp_horizon=shape.cycle_length,
        num_parallel_layers=shape.num_parallel_layers,
        num_sequential_layers=shape.num_layers - shape.num_parallel_layers,
        mask_token_id=shape.mask_token_id,
        dmtd_history_mode=history,
        dmtd_block_attention=block_attention,
        qk_norm=shape.qk_norm,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_theta": shape.rope_theta} | (YARN if shape.frequencies else {"rope_type": "default"}),
        tie_word_embeddings=shape.tie_word_embeddings,
        attention_bias=shape.qkv_bias,
        attention_output_bias=shape.output_bias,
        **windows_of(shape),
    )
    model = DMTDQwen3ForCausalLM(config).double()
    missing = model.load_state_dict(weights, strict=False)
    assert missing.unexpected_keys == []
    assert missing.missing_keys == (["lm_head.weight"] if shape.tie_word_embeddings else [])
    return model.eval()


@each_shape
@each_kind
def test_both_paths_give_the_oracles_logits(shape, history, block_attention):
    weights = random_weights(shape, seed=3)
    model = model_of(shape, weights, history, block_attention)
    kind = {"history": history, "block_attention": block_attention, "token_ids": IDS}
    expected = teacher_forced_logits(weights, shape, **kind)
    assert expected.std() > 1
    with torch.no_grad():
        torch.testing.assert_close(model(torch.tensor([IDS])).logits[0], expected, rtol=0, atol=TOLERANCE)
    for prompt_length in (1, 4, 6):
        decoded = decoded_logits(model, torch.tensor([IDS]), prompt_length)[0]
        oracle = cycled_decode(weights, shape, prompt_length=prompt_length, **kind)
        torch.testing.assert_close(decoded[prompt_length - 1 :], oracle.logits, rtol=0, atol=TOLERANCE)


@each_shape
@each_kind
def test_caches_hold_the_oracles_keys_and_values_at_the_end_of_every_cycle(shape, history, block_attention):
    weights = random_weights(shape, seed=3)
    model = model_of(shape, weights, history, block_attention)
    oracle = cycled_decode(weights, shape, history=history, block_attention=block_attention, token_ids=IDS, prompt_length=1)
    ends = [min((snapshot.cycle + 1) * shape.cycle_length, len(IDS)) for snapshot in oracle.snapshots]
    assert len(ends) > 3 and ends[-1] == len(IDS)
    cache = None
    for end, snapshot in zip(ends, oracle.snapshots):
        start = 0 if cache is None else cache.lengths[0]
        with torch.no_grad():
            for column in range(start, end):
                cache = model(torch.tensor([[IDS[column]]]), cache=cache, use_cache=True).cache
        for layer, expected in {**snapshot.parallel, **snapshot.sequential}.items():
            assert cache.layer_lengths(layer) == [len(expected.positions)]
            if expected.positions:
                keys, values = cache.row(layer, 0)
                torch.testing.assert_close(keys, expected.keys, rtol=0, atol=TOLERANCE)
                torch.testing.assert_close(values, expected.values, rtol=0, atol=TOLERANCE)
