"""Native kernels against torch, and engines on them against transformers in fp32."""

import dataclasses
import random

import pytest
import torch

from megatron_dmtd.errors import CapabilityError, ConfigError
from megatron_dmtd.inference import EngineConfig, SamplingParams
from megatron_dmtd.inference.native import build
from megatron_dmtd.inference.native.build import load_kernels
from megatron_dmtd.inference.ops.matmul import FastestMatmul
from tests.hf.tiny import random_ids
from tests.inference.models import KINDS, PENALTY, Pair

#: Sizes that the kernels' vectors divide; the feed-forward size leaves a remainder on purpose.
WIDE = {"hidden_size": 48, "intermediate_size": 70, "head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 2}
CONFIG = EngineConfig(max_batch=4, max_length=128, cache_tokens=512, chunk_tokens=24, kernels="native")


@pytest.fixture(scope="module")
def wide_pairs(tmp_path_factory) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("wide")
    return {kind: Pair(folder, kind, qk_norm=kind != "causal-norefresh", dtype=torch.float32, **WIDE) for kind in KINDS}


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 9, 16, 21])
@pytest.mark.parametrize("way", ["native", "linear", "transposed"])
def test_every_way_of_multiplying_gives_the_product(rows, way):
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 53, generator=generator), torch.randn(38, 53, generator=generator)
    bias, residual = torch.randn(38, generator=generator), torch.randn(rows, 38, generator=generator)
    fastest = FastestMatmul(load_kernels(), [weight], max_rows=4)
    product = x.double() @ weight.double().t()
    for own_bias, own_residual, expected in (
        (None, None, product),
        (bias, None, product + bias),
        (bias, residual.clone(), product + bias + residual),
        (None, residual.clone(), product + residual),
    ):
        out = torch.empty(rows, 38) if own_residual is None else own_residual
        fastest.ways[way](out, x, weight, own_bias, own_residual)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [8, 9, 33, 64, 65, 130])
def test_products_in_several_blocks_of_columns_and_rows(rows, dtype):
    """Above eight rows weights are taken 256 columns at a time, above 64 the rows in parts: two whole blocks and a remainder.

    Level: fp32 sums of 705 products of standard normals, against float64.
    """
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 705, generator=generator), torch.randn(41, 705, generator=generator).to(dtype)
    out = torch.full((rows, 41), torch.nan)
    is_bf16 = int(dtype == torch.bfloat16)
    load_kernels().dmtd_matmul(x.data_ptr(), weight.data_ptr(), None, None, out.data_ptr(), rows, 705, 41, is_bf16)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-4)


def test_bfloat16_weights_are_read_as_the_numbers_they_are():
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(8, 53, generator=generator), torch.randn(38, 53, generator=generator).bfloat16()
    out = torch.empty(8, 38)
    load_kernels().dmtd_matmul(x.data_ptr(), weight.data_ptr(), None, None, out.data_ptr(), 8, 53, 38, 1)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-5)


def test_norm_and_gate_are_those_of_torch_over_the_whole_range():
    kernels, x = load_kernels(), torch.linspace(-200, 200, 3 * 2 * 37).view(3, 74)
    out = torch.empty(3, 37)
    kernels.dmtd_gate(x.data_ptr(), out.data_ptr(), 3, 37)
    torch.testing.assert_close(out, torch.nn.functional.silu(x[:, :37]) * x[:, 37:], rtol=2e-6, atol=1e-30)
    weight, normed = torch.linspace(0.5, 2, 74), torch.empty(3, 74)
    kernels.dmtd_norm(x.data_ptr(), weight.data_ptr(), normed.data_ptr(), 3, 74, 1e-6)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(x, (74,), weight, 1e-6), rtol=2e-6, atol=1e-6)


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
    assert calls["torch"] > 0


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_matrices_under_fp32_give_the_tokens_of_the_same_weights_in_fp32(tmp_path, kind, kernels):
    pair = Pair(tmp_path, kind, dtype=torch.bfloat16, **WIDE)
    pair.slow.float()
    config = dataclasses.replace(CONFIG, kernels=kernels)
    engine = pair.engine(config, dtype="float32", matrix_dtype="bfloat16")
    assert engine.model.layers[0].qkv.dtype == engine.model.head_VX.dtype == torch.bfloat16
    assert engine.model.layers[0].input_norm_X.dtype == engine.pools.sequential.k_LNGET.dtype == torch.float32
    prompts = [random_ids(length, seed=length).tolist() for length in (5, 30, 12)]
    params = SamplingParams(ignore_eos=True, repetition_penalty=PENALTY)
    completions = engine.generate(prompts, max_new_tokens=15, params=params)
    assert [list(completion.token_ids) for completion in completions] == [pair.greedy(prompt, 15) for prompt in prompts]


def test_other_mixtures_of_types_are_refused(pairs):
    with pytest.raises(ConfigError, match="matrix_dtype 'float64' with dtype 'float32'"):
        pairs["vanilla"].engine(dtype="float32", matrix_dtype="float64")
    assert pairs["vanilla"].engine(dtype="float32", matrix_dtype="float32").model.head_VX.dtype == torch.float32


def _count_calls(engine) -> dict[str, int]:
    """How many passes each kind of kernel has served."""
    counts = {"native": 0, "torch": 0}
    choose = engine.runner._ops

    def counted(run):
        ops = choose(run)
        counts["native" if ops is engine.runner.native_ops else "torch"] += 1
        return ops

    engine.runner._ops = counted
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
    assert automatic.runner.native_ops is None
    assert wide_pairs["vanilla"].engine(EngineConfig(max_length=64, kernels="torch"), dtype="float32").runner.native_ops is None


def test_a_missing_or_failing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(CapabilityError, match="no C compiler"):
        build.load_kernels.__wrapped__()
    monkeypatch.setattr(build, "COMPILERS", ("false",))
    with pytest.raises(CapabilityError, match="cannot compile"):
        build.load_kernels.__wrapped__()


def test_few_rows_go_the_native_way_whatever_is_measured_and_more_the_fastest():
    few = FastestMatmul(load_kernels(), [torch.randn(38, 53)], max_rows=8)
    assert few.measured_ms == {} and few.way(8) == "native" and few.way(9) == "linear"
    more = FastestMatmul(load_kernels(), [torch.randn(38, 53)], max_rows=20)
    assert list(more.measured_ms) == [12, 16, 24]
    more.measured_ms[16] = {"native": 1.0, "linear": 0.8, "transposed": 0.95}
    more.measured_ms[24] = {"native": 1.0, "linear": 0.95, "transposed": 2.0}
    assert [more._choice(rows) for rows in (1, 8, 13, 16, 17, 24)] == ["native", "native", "linear", "linear", "native", "native"]
