"""What an engine is made of, given a model and a config: the size of its store, kernels, kind of steps."""

import pytest
import torch

from megatron_dmtd.errors import CapabilityError, ConfigError
from megatron_dmtd.inference import EngineConfig
from megatron_dmtd.inference.assembly import make_store, native_refusal, product_note, step_mode
from megatron_dmtd.inference.loading import load_model


@pytest.fixture(scope="module")
def model(pairs):
    """Four layers, two of them parallel; two key heads of size 8; 512 positions."""
    return load_model(pairs["causal-refresh"].directory, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("config", "num_pages", "max_length"),
    [
        (EngineConfig(max_batch=2), 2 * 33, 512),
        (EngineConfig(max_batch=2, max_length=100), 2 * 8, 100),
        (EngineConfig(cache_tokens=100), 6, 96),
        # 2 (K and V) * 4 layers * 2 key heads * 16 entries * 8 * 4 bytes = 8 KiB a page
        (EngineConfig(cache_bytes=5 * 8192 + 8191), 5, 80),
    ],
    ids=repr,
)
def test_a_store_holds_a_batch_of_full_length_as_far_as_the_memory_goes(model, config, num_pages, max_length):
    store, found = make_store(model, config, num_scratch_pages=3)
    assert found == max_length and set(store.groups) == {"parallel", "sequential"}
    for group in store.groups.values():
        assert group.pages.num_pages == num_pages
        assert [place.v_PGTD.shape[0] for place in group.places] == [num_pages + 3] * 2


def test_a_store_too_small_for_one_request_of_full_length_is_refused(model):
    with pytest.raises(ConfigError, match="room for 96 tokens in the K/V store, for max_length=97"):
        make_store(model, EngineConfig(cache_tokens=100, max_length=97), num_scratch_pages=0)
    with pytest.raises(ConfigError, match="room for 0 pages"):
        make_store(model, EngineConfig(cache_bytes=8191), num_scratch_pages=0)


def test_steps_are_static_only_where_that_is_asked_for_or_helps():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    found = {
        (name, device.type): step_mode(EngineConfig(cuda_graphs=name), device)
        for name in ("auto", "off")
        for device in (cpu, cuda)
    }
    assert found == {
        ("auto", "cpu"): "dynamic",
        ("auto", "cuda"): "graphs",
        ("off", "cpu"): "dynamic",
        ("off", "cuda"): "dynamic",
    }
    assert step_mode(EngineConfig(cuda_graphs="shapes"), cpu) == step_mode(EngineConfig(cuda_graphs="shapes"), cuda) == "static"
    with pytest.raises(CapabilityError, match="CUDA graphs on cpu"):
        step_mode(EngineConfig(cuda_graphs="on"), cpu)


def test_why_the_native_kernels_are_not_used_is_said_or_raised(model):
    assert native_refusal(model, EngineConfig()) == "pages of 16 tokens, heads of 8"
    assert native_refusal(model, EngineConfig(kernels="torch")) == "kernels='torch'"
    with pytest.raises(CapabilityError, match="heads of 8"):
        native_refusal(model, EngineConfig(kernels="native"))


def test_products_in_bfloat16_need_matrices_in_it_and_native_kernels(pairs, monkeypatch):
    directory, cpu = pairs["causal-refresh"].directory, torch.device("cpu")
    half = load_model(directory, device=cpu, matrix_dtype=torch.bfloat16)
    wanted = EngineConfig(bf16_products=True)
    with pytest.raises(ConfigError, match="matrices in torch"):
        product_note(load_model(directory, device=cpu), wanted, "")
    with pytest.raises(ConfigError, match="bf16_products with kernels='torch'"):
        product_note(half, wanted, "kernels='torch'")
    with pytest.raises(ConfigError, match="bf16_products=1"):
        EngineConfig(bf16_products=1).check()
    notes = {}
    for has_instructions in (True, False):
        monkeypatch.setattr("megatron_dmtd.inference.assembly.has_bf16_instructions", lambda found=has_instructions: found)
        all_half = load_model(directory, device=cpu, dtype=torch.bfloat16)
        asked = (half, wanted), (half, EngineConfig()), (all_half, EngineConfig())
        notes[has_instructions] = [product_note(model, config, "") for model, config in asked]
    assert notes[True] == ["", "", ""] and notes[False][1] == ""
    assert "run in fp32 and are rounded" in notes[False][0] and "dtype='bfloat16' is slow here" in notes[False][2]
