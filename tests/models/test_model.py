"""Megatron's forward pass, Hugging Face's and the oracle's are one function, in all four variants.

Level: fp32 tolerance against float64. The logits spread over tens, fp32 carries 7 digits through 4 layers; the largest difference
seen was 5e-5. Bitwise equality cannot hold between libraries that order their sums differently.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_dmtd.config import Config
from megatron_dmtd.config.decoder import decoder_of
from megatron_dmtd.families import ModelDescription, write_fields
from tests.oracles.parallel_dmtd import teacher_forced_logits, vanilla_logits
from tests.support.oracle_weights import megatron_tensors, shape_of, wide_weights
from tests.support.ranks import run_ranks
from tests.support.tiny import MASK, VARIANTS, tiny_config

TOLERANCE = 2e-4
DOCUMENTS = (12, 4, 16)


def _tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, MASK, shape, generator=torch.Generator().manual_seed(seed))


def megatron_model(config: Config, own: dict[str, torch.Tensor]) -> Any:
    """The whole model on one rank, with the given tensors. Runs inside a rank."""
    from megatron_dmtd.parallel.groups import init_parallel
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training.setup import build_models

    platform = prepare_megatron()
    init_parallel(config, platform)
    (model,) = build_models(config, platform)
    state = model.state_dict()
    assert {name for name, tensor in state.items() if tensor is not None} >= set(own)
    model.load_state_dict({**state, **own})
    return model.eval()


@torch.no_grad()
def megatron_logits(
    config: Config, own: dict[str, torch.Tensor], tokens_BN: torch.Tensor, documents: tuple[int, ...]
) -> torch.Tensor:
    """Logits [B, N, V] of rows that hold documents of these lengths."""
    model = megatron_model(config, own)
    positions = torch.cat([torch.arange(length) for length in documents]).expand_as(tokens_BN)
    return model(tokens_BN, positions, document_lengths=(documents,) * len(tokens_BN))


def hf_model(config: Config) -> Any:
    """The exported model code with random weights."""
    from megatron_dmtd.hf import DMTDQwen3Config, DMTDQwen3ForCausalLM

    return DMTDQwen3ForCausalLM(DMTDQwen3Config(**write_fields(ModelDescription(model=config.model, cycle=config.cycle))))


def _hugging_face_logits(config: Config, weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:

    model = hf_model(config)
    result = model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
    assert not result.unexpected_keys and set(result.missing_keys) <= {"lm_head.weight"}
    with torch.no_grad():
        return model.eval()(tokens).logits


def _oracle_logits(config: Config, weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    if config.cycle.is_vanilla:
        return vanilla_logits(weights, shape_of(config), tokens.tolist())
    return teacher_forced_logits(
        weights,
        shape_of(config),
        history=config.cycle.history,
        block_attention=config.cycle.block_attention,
        token_ids=tokens.tolist(),
    )


@pytest.mark.multiprocess
@pytest.mark.parametrize("model", [{}, {"tie_word_embeddings": False, "qk_norm": False}], ids=["qwen3-tied", "llama-untied"])
@pytest.mark.parametrize("variant", [*VARIANTS, "vanilla"])
def test_megatron_forward_equals_the_oracle_for_packed_documents(variant: str, model: dict[str, Any]) -> None:
    config = tiny_config(variant, model=model)
    weights = wide_weights(config)
    tokens = _tokens(2, sum(DOCUMENTS))
    found = run_ranks(1, megatron_logits, config, megatron_tensors(config, weights), tokens, DOCUMENTS)[0]
    assert found.std() > 1, "logits that are all alike would agree with anything"
    for row in range(2):
        expected = [_oracle_logits(config, weights, document) for document in tokens[row].split(DOCUMENTS)]
        torch.testing.assert_close(found[row].double(), torch.cat(expected), atol=TOLERANCE, rtol=0)


@pytest.mark.multiprocess
@pytest.mark.parametrize("variant", VARIANTS)
def test_megatron_forward_equals_hugging_face_forward(variant: str) -> None:
    config = tiny_config(variant)
    weights = wide_weights(config)
    tokens = _tokens(3, 32, seed=1)
    found = run_ranks(1, megatron_logits, config, megatron_tensors(config, weights), tokens, (32,))[0]
    torch.testing.assert_close(found, _hugging_face_logits(config, weights, tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.multiprocess
def test_variants_are_different_models() -> None:
    tokens = _tokens(1, 32, seed=2)
    logits = {}
    for variant in (*VARIANTS, "vanilla"):
        config = tiny_config(variant)
        own = megatron_tensors(config, wide_weights(config))
        logits[variant] = run_ranks(1, megatron_logits, config, own, tokens, (32,))[0]
    names = list(logits)
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            assert (logits[first] - logits[second]).abs().max() > 0.1, f"{first} and {second} give the same logits"


@pytest.mark.multiprocess
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_later_token_or_another_document_changes_no_logit(variant: str) -> None:
    config = tiny_config(variant)
    own = megatron_tensors(config, wide_weights(config))
    tokens = _tokens(1, sum(DOCUMENTS), seed=3)
    changed_at = 9  # in the first document, not a cycle head
    changed = tokens.clone()
    changed[0, changed_at] = (changed[0, changed_at] + 1) % MASK
    before, after = run_ranks(1, _two_forwards, config, own, tokens, changed)[0]
    assert torch.equal(before[0, :changed_at], after[0, :changed_at])
    assert torch.equal(before[0, DOCUMENTS[0] :], after[0, DOCUMENTS[0] :])
    assert not torch.equal(before[0, changed_at : DOCUMENTS[0]], after[0, changed_at : DOCUMENTS[0]])


def _two_forwards(config: Config, own: dict[str, torch.Tensor], first: torch.Tensor, second: torch.Tensor) -> Any:
    model = megatron_model(config, own)
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    with torch.no_grad():
        return [model(tokens, positions, document_lengths=(DOCUMENTS,)) for tokens in (first, second)]


def _against_gpt_model(config: Config, tokens: torch.Tensor) -> tuple[dict[str, torch.Size], dict[str, torch.Size], Any, Any]:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_dmtd.models.norm import RMSNorm
    from megatron_dmtd.models.transformer_config import transformer_config

    ours = megatron_model(config, megatron_tensors(config, wide_weights(config)))
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = RMSNorm
    gpt = GPTModel(
        transformer_config(config, on_cuda=False),
        spec,
        vocab_size=128,
        max_sequence_length=128,
        position_embedding_type="rope",
        rotary_base=int(config.model.rope_theta),
        share_embeddings_and_output_weights=True,
    ).eval()
    shapes = [{name: parameter.shape for name, parameter in model.named_parameters()} for model in (ours, gpt)]
    gpt.load_state_dict(ours.state_dict())
    positions = torch.arange(tokens.shape[1])[None].expand_as(tokens)
    later = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        expected = gpt(tokens, positions, later)[..., : config.model.vocab_size]
        found = ours(tokens, positions, document_lengths=((tokens.shape[1],),) * len(tokens))
    return shapes[0], shapes[1], found, expected


@pytest.mark.multiprocess
@pytest.mark.parametrize("variant", [*VARIANTS, "vanilla"])
def test_parameters_are_those_of_megatrons_gpt_model(variant: str) -> None:
    ours, gpt, found, expected = run_ranks(1, _against_gpt_model, tiny_config(variant), _tokens(2, 32, seed=4))[0]
    assert ours == gpt
    if variant == "vanilla":
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    else:
        assert (found - expected).abs().max() > 0.1


def megatron_gradients(config: Config, own: dict[str, torch.Tensor], tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of the summed next-token loss of one row, by the names of a whole model."""
    model = megatron_model(config, own)
    slots = tokens.shape[1]
    labels = tokens.roll(-1, dims=1)
    loss = model(tokens, torch.arange(slots)[None], labels, document_lengths=((slots,),))
    loss[:, :-1].sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.multiprocess
@pytest.mark.parametrize("model", [{}, {"tie_word_embeddings": False, "qk_norm": False}], ids=["qwen3-tied", "llama-untied"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_megatron_gradients_equal_hugging_face_autograd(variant: str, model: dict[str, Any]) -> None:
    """Level: fp32 tolerance, relative to the largest entry of each gradient; both are sums of thousands of terms."""
    from megatron_dmtd.weights.megatron_names import to_hf

    config = tiny_config(variant, model=model)
    weights = {name: tensor * (0.3 if "embed" in name else 1.0) for name, tensor in wide_weights(config).items()}
    tokens = _tokens(1, 32, seed=5)
    found = to_hf(
        decoder_of(config.model), run_ranks(1, megatron_gradients, config, megatron_tensors(config, weights), tokens)[0]
    )
    reference = hf_model(config).double()
    reference.load_state_dict(weights, strict=False)
    (reference(tokens, labels=tokens).loss * 31).backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 1e-3, f"{name} has no gradient to compare"
        error = (found[name].double() - gradient).abs().max() / gradient.abs().max()
        assert error < 1e-4, (name, error.item())
