"""Native kernels against torch, and engines on them against transformers in fp32."""

import dataclasses
import random

import pytest
import torch

from megatron_dmtd.errors import CapabilityError, ConfigError
from megatron_dmtd.inference import EngineConfig, SamplingParams
from megatron_dmtd.inference.native.build import load_kernels
from megatron_dmtd.inference.ops.native_ops import NativeOps
from megatron_dmtd.inference.ops.torch_ops import TorchOps
from tests.hf.tiny import random_ids
from tests.inference.looped_models import engine_of, logprobs_of, oracle_logits
from tests.inference.models import KINDS, PENALTY, Pair
from tests.inference.ops.passes_to_try import SHAPE, Setting
from tests.oracles.looped import Looped, random_weights
from tests.oracles.parallel_dmtd import FOUR_VARIANTS

#: Sizes that the kernels' vectors divide; the feed-forward size leaves a remainder on purpose.
WIDE = {"hidden_size": 48, "intermediate_size": 70, "head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 2}
CONFIG = EngineConfig(max_batch=4, max_length=128, cache_tokens=512, chunk_tokens=24, kernels="native")


@pytest.fixture(scope="module")
def wide_pairs(tmp_path_factory) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("wide")
    return {kind: Pair(folder, kind, qk_norm=kind != "causal-norefresh", dtype=torch.float32, **WIDE) for kind in KINDS}


def test_norm_and_gate_are_those_of_torch_over_the_whole_range():
    kernels, x = load_kernels(), torch.linspace(-200, 200, 3 * 2 * 37).view(3, 74)
    out = torch.empty(3, 37)
    kernels.dmtd_gate(x.data_ptr(), None, out.data_ptr(), 3, 37)
    torch.testing.assert_close(out, torch.nn.functional.silu(x[:, :37]) * x[:, 37:], rtol=2e-6, atol=1e-30)
    weight, normed = torch.linspace(0.5, 2, 74), torch.empty(3, 74)
    kernels.dmtd_norm(x.data_ptr(), weight.data_ptr(), normed.data_ptr(), 3, 74, 1e-6)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(x, (74,), weight, 1e-6), rtol=2e-6, atol=1e-6)


def test_unit_norms_steps_and_gates_are_those_of_float64():
    """Sizes that vectors do not divide. Level: fp32 rounding."""
    kernels, generator = load_kernels(), torch.Generator().manual_seed(3)
    x, y, size = *torch.randn(2, 3, 37, generator=generator).unbind(), torch.rand(37, generator=generator)

    def unit(one: torch.Tensor) -> torch.Tensor:
        return one / (one.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()

    normed, stepped = torch.empty(3, 37), x.clone()
    kernels.dmtd_norm(x.data_ptr(), None, normed.data_ptr(), 3, 37, 1e-6)
    torch.testing.assert_close(normed.double(), unit(x.double()), rtol=2e-6, atol=1e-7)
    kernels.dmtd_step(stepped.data_ptr(), y.data_ptr(), size.data_ptr(), 3, 37, 1e-6)
    start, end = unit(x.double()), unit(y.double())
    torch.testing.assert_close(stepped.double(), unit(start + size.double() * (end - start)), rtol=2e-6, atol=1e-7)

    rows = torch.tensor([2, 0])
    for eps in (1e-6, -1.0):
        gated = y[:2].clone()
        kernels.dmtd_gate_heads(gated.data_ptr(), x.data_ptr(), 37, size.data_ptr(), rows.data_ptr(), 2, 30, eps)
        # The kernel takes two rows of 30 numbers.
        taken = y[:2].double().flatten()[:60].view(2, 30) * torch.sigmoid(x.double()[rows, :30] * size.double()[:30])
        taken = unit(taken) if eps > 0 else taken
        torch.testing.assert_close(gated.double().flatten()[:60].view(2, 30), taken, rtol=4e-6, atol=1e-7)

    scale, out = torch.rand(74, generator=generator) * 4, torch.empty(3, 37)
    gate_up = torch.cat([x, y], dim=-1)
    kernels.dmtd_gate(gate_up.data_ptr(), scale.data_ptr(), out.data_ptr(), 3, 37)
    gate, up = (gate_up.double() * scale.double()).chunk(2, -1)
    torch.testing.assert_close(out.double(), torch.nn.functional.silu(gate) * up, rtol=4e-6, atol=1e-7)


LOOPED = {
    "normalized": Looped(windows=(None, 5, None, 5), head_dim=16, hidden_size=40),
    "concat_linear": Looped(windows=(None, 5, None, 5), head_dim=16, normalized=False, injection="concat_linear"),
    "parallel": Looped(
        windows=(None, 5, None, 5, None),
        head_dim=16,
        num_output_layers=2,
        num_parallel_layers=4,
        normalized=False,
        injection="add",
    ),
}


@pytest.mark.parametrize("shape", LOOPED.values(), ids=LOOPED)
@pytest.mark.parametrize("mode", ["per_loop", "last_loop"])
def test_native_kernels_give_the_oracles_numbers_for_looped_layers(shape, mode):
    """Requests of different loops together. Level: fp32 rounding of logits of a few units, through up to nine visits."""
    weights, kind = random_weights(shape, seed=1), "real-bidirectional" if shape.num_parallel_layers else "vanilla"
    settings = {"page_size": 16, "kernels": "native", "kv_mode": mode, "num_loops": 3, "prefill_chunk": 8}
    engine = engine_of(shape, weights, kind, dtype=torch.float32, **settings)
    calls = _count_calls(engine)
    texts, loops = [random_ids(length, seed=length).tolist() for length in (21, 34, 6)], (3, 1, 2)
    params = [SamplingParams(ignore_eos=True, logprobs=0, num_loops=number) for number in loops]
    for prompt, number, one in zip(texts, loops, engine.generate(texts, max_new_tokens=12, params=params), strict=True):
        tokens = [*prompt, *one.token_ids]
        logits = oracle_logits(shape, weights, tokens, prompt_length=len(prompt), chunk=8, mode=mode, loops=number, kind=kind)
        found = torch.tensor([choice.logprob for choice in one.logprobs], dtype=torch.float64)
        torch.testing.assert_close(found, logprobs_of(logits, tokens)[len(prompt) - 1 :], rtol=0, atol=2e-4)
    assert calls["native"] > 20 and calls["torch"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_native_engines_give_the_tokens_of_generate_in_fp32(wide_pairs, kind):
    pair = wide_pairs[kind]
    engine = pair.engine(CONFIG, dtype="float32")
    assert engine.kernel_note == ""
    calls = _count_calls(engine)
    prompts = [random_ids(length, seed=length).tolist() for length in (1, 6, 33, 18, 4, 9)]
    random.Random(3).shuffle(prompts)
    params = SamplingParams(ignore_eos=True, repetition_penalty=PENALTY)
    completions = engine.generate(prompts, max_new_tokens=20, params=params)
    assert [list(completion.token_ids) for completion in completions] == [pair.greedy(prompt, 20) for prompt in prompts]
    assert calls["native"] > 20
    assert calls["torch"] == 0


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_matrices_under_fp32_give_the_tokens_of_the_same_weights_in_fp32(tmp_path, kind, kernels):
    pair = Pair(tmp_path, kind, dtype=torch.bfloat16, **WIDE)
    pair.slow.float()
    config = dataclasses.replace(CONFIG, kernels=kernels)
    engine = pair.engine(config, dtype="float32", matrix_dtype="bfloat16")
    assert engine.model.layers[0].qkv.weight.dtype == engine.model.head.weight.dtype == torch.bfloat16
    assert engine.model.layers[0].attention_norm.weight.dtype == torch.float32
    assert engine.store.groups["sequential"].places[0].v_PGTD.dtype == torch.float32
    prompts = [random_ids(length, seed=length).tolist() for length in (5, 30, 12)]
    params = SamplingParams(ignore_eos=True, repetition_penalty=PENALTY)
    completions = engine.generate(prompts, max_new_tokens=15, params=params)
    assert [list(completion.token_ids) for completion in completions] == [pair.greedy(prompt, 15) for prompt in prompts]


def test_other_mixtures_of_types_are_refused(pairs):
    with pytest.raises(ConfigError, match="matrix_dtype 'float64' with dtype 'float32'"):
        pairs["vanilla"].engine(dtype="float32", matrix_dtype="float64")
    assert pairs["vanilla"].engine(dtype="float32", matrix_dtype="float32").model.head.weight.dtype == torch.float32


def _count_calls(engine) -> dict[str, int]:
    """How many passes each kind of kernel has served."""
    counts = {"native": 0, "torch": 0}
    choose = engine.runner.forward.ops

    def counted(run):
        ops = choose(run)
        counts["native" if isinstance(ops, NativeOps) else "torch"] += 1
        return ops

    engine.runner.forward.ops = counted
    return counts


@pytest.mark.parametrize("kind", ["bidirectional-refresh", "causal-norefresh"])
def test_logits_of_native_and_torch_steps_agree_to_rounding(wide_pairs, kind):
    prompt = random_ids(43, seed=2).tolist()
    logprobs = {}
    for kernels in ("native", "torch"):
        config = EngineConfig(max_batch=1, max_length=128, cache_tokens=256, chunk_tokens=24, kernels=kernels)
        engine = wide_pairs[kind].engine(config, dtype="float32")
        params = SamplingParams(ignore_eos=True, repetition_penalty=PENALTY, logprobs=61)
        (completion,) = engine.generate([prompt], max_new_tokens=17, params=params)
        logprobs[kernels] = [sorted(choice.top_logprobs) for choice in completion.logprobs]
    native, torch_ = torch.tensor(logprobs["native"]), torch.tensor(logprobs["torch"])
    assert native[..., 1].std() > 1
    torch.testing.assert_close(native, torch_, rtol=0, atol=2e-4)


def test_what_the_kernels_cannot_do_is_refused_or_left_to_torch(pairs, wide_pairs):
    pair = pairs["causal-refresh"]
    with pytest.raises(CapabilityError, match="heads of 8"):
        pair.engine(CONFIG, dtype="float32")
    with pytest.raises(CapabilityError, match="float64"):
        pair.engine(CONFIG)
    automatic = pair.engine(EngineConfig(max_length=64), dtype="float32")
    assert automatic.kernel_note == "pages of 16 tokens, heads of 8"
    assert automatic.runner.forward.native is None
    assert (
        wide_pairs["vanilla"].engine(EngineConfig(max_length=64, kernels="torch"), dtype="float32").runner.forward.native is None
    )


@pytest.mark.parametrize("kind", FOUR_VARIANTS, ids=["-".join(kind) for kind in FOUR_VARIANTS])
@pytest.mark.parametrize(("starts", "shift"), [((36, 20), 0), ((8, 32), 0), ((0, 16), 0), ((36, 20), -2)])
def test_every_operation_of_every_visit_gives_what_torch_gives(kind, starts, shift):
    """Two requests whose pages interleave, windows in three of four layers. Level: fp32 sums in another order."""
    native, plain = (Setting(*kind, starts=starts, shift=shift) for _ in range(2))
    for (pass_name, visit), (_, other) in zip(native.visits(), plain.visits(), strict=True):
        run, other_run = native.dynamic(pass_name), plain.dynamic(pass_name)
        ops, torch_ops = NativeOps(native.forward.native, run), TorchOps(other_run)
        qkv = ops.rotate_and_store(native.qkv[pass_name].clone(), visit)
        expected = torch_ops.rotate_and_store(plain.qkv[pass_name].clone(), other)
        torch.testing.assert_close(qkv, expected, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(visit.pages.k_PGDT, other.pages.k_PGDT, rtol=2e-6, atol=2e-6)
        assert torch.equal(visit.pages.v_PGTD, other.pages.v_PGTD)
        for final_only in (False, True):
            found = ops.attend(qkv, visit, final_only=final_only).clone()
            torch.testing.assert_close(found, torch_ops.attend(expected, other, final_only=final_only), rtol=0, atol=2e-5)
        linear, wide = visit.weights.gate_up, torch.randn(len(run), SHAPE.hidden_size)
        torch.testing.assert_close(ops.linear(wide, linear), torch_ops.linear(wide, linear), rtol=0, atol=2e-4)
