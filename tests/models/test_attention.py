"""The parts that decoders differ in are computed as transformers computes them: biases, sliding windows, rotary profiles.

The reference is transformers' own layers in float64, in the order of docs/method.md (`oracles.cycled_transformers`); for vanilla
that is transformers' whole model. Level: fp32 tolerance.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_dmtd.config import Config
from tests.models.families import FAMILIES, LAYERS, megatron_tensors
from tests.models.test_model import megatron_model
from tests.oracles.cycled_transformers import teacher_forced_logits
from tests.support.ranks import run_ranks
from tests.support.tiny import MASK, VARIANTS, tiny_config

TOLERANCE = 2e-4
DOCUMENTS = (12, 4, 16)
KINDS = ("vanilla", *VARIANTS)


def config_of(family: str, variant: str, **sections: Any) -> Config:
    return tiny_config(variant, model={"tie_word_embeddings": False} | FAMILIES[family].settings, **sections)


def tokens_of(seed: int = 0) -> torch.Tensor:
    return torch.randint(1, MASK, (1, sum(DOCUMENTS)), generator=torch.Generator().manual_seed(seed))


def logits_and_gradients(
    config: Config, own: dict[str, torch.Tensor], tokens_BN: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of a packed row, and the gradients of the sum of its losses. Runs in a rank."""
    model = megatron_model(config, own)
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    with torch.no_grad():
        logits = model(tokens_BN, positions, document_lengths=(DOCUMENTS,))
    model(tokens_BN, positions, tokens_BN.roll(-1, dims=1), document_lengths=(DOCUMENTS,)).sum().backward()
    return logits[0], {name: parameter.grad for name, parameter in model.named_parameters()}


def reference(family: str, variant: str, tokens_BN: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """transformers' model, and its logits with gradients."""
    model = FAMILIES[family].build()
    logits = teacher_forced_logits(
        model,
        tokens_BN[0].tolist(),
        DOCUMENTS,
        variant=variant,
        num_parallel_layers=0 if variant == "vanilla" else 2,
        mask_token_id=MASK,
        windows=FAMILIES[family].windows,
    )
    return model, logits


@pytest.mark.multiprocess
@pytest.mark.parametrize("variant", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers_layers(family: str, variant: str) -> None:
    tokens = tokens_of()
    model, expected = reference(family, variant, tokens)
    own = {name: tensor.float() for name, tensor in megatron_tensors(model.state_dict()).items()}
    logits, found = run_ranks(1, logits_and_gradients, config_of(family, variant), own, tokens)[0]
    assert expected.std() > 1, "logits that are all alike would agree with anything"
    torch.testing.assert_close(logits.double(), expected.detach(), atol=TOLERANCE, rtol=0)

    torch.nn.functional.cross_entropy(expected, tokens.roll(-1, dims=1)[0], reduction="sum").backward()
    gradients = megatron_tensors({name: parameter.grad for name, parameter in model.named_parameters()})
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 1e-3, f"{name} has no gradient to compare"
        error = (found[name].double() - gradient).abs().max() / gradient.abs().max()
        assert error < 1e-4, (name, error.item())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_for_vanilla_is_transformers_whole_model(family: str) -> None:
    tokens = tokens_of()
    model, found = reference(family, "vanilla", tokens)
    with torch.no_grad():
        documents = [model(document).logits[0] for document in tokens.split(DOCUMENTS, dim=1)]
    torch.testing.assert_close(found, torch.cat(documents), atol=1e-5, rtol=0)  # its softmax is fp32 in any model


def backends_agree(config: Config, own: dict[str, torch.Tensor], tokens: torch.Tensor) -> float:
    """The largest difference of logits between the dense backend and the masked one. Runs in a rank."""
    model = megatron_model(config, own)
    positions = torch.arange(tokens.shape[1])[None]
    found = []
    for backend in ("dense", "masked"):
        model.backend_name = backend
        with torch.no_grad():
            found.append(model(tokens, positions, document_lengths=((tokens.shape[1],),)))
    return float((found[0] - found[1]).abs().max())


@pytest.mark.multiprocess
@pytest.mark.parametrize("variant", KINDS)
def test_documents_of_several_chunks_agree_with_the_masked_backend(variant: str) -> None:
    """Longer than the kernels' chunks, under windows shorter and longer than one."""
    tokens = torch.randint(1, MASK, (1, 640), generator=torch.Generator().manual_seed(0))
    for window in (9, 300):
        model = {"sliding_window": window, "windowed_layers": (0, 2, 3), "max_position_embeddings": 640}
        config = tiny_config(variant, model=model | {"tie_word_embeddings": False}, data={"seq_length": 640})
        own = {name: tensor.float() for name, tensor in megatron_tensors(FAMILIES["qwen3-linear"].build().state_dict()).items()}
        assert run_ranks(1, backends_agree, config, own, tokens)[0] < TOLERANCE


def parameters_and_decay(config: Config) -> dict[str, tuple[bool, int, float, bool]]:
    """Of each attention bias: whether it is split over tensor ranks, along which dimension, its spread, and its weight decay."""
    from megatron_dmtd.parallel.groups import init_parallel
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training.setup import build_run

    platform = prepare_megatron()
    init_parallel(config, platform)
    run = build_run(config, platform)
    decayed = {id(parameter) for group in run.optimizer.param_groups if group["wd_mult"] for parameter in group["params"]}
    found = {}
    for name, parameter in run.models[0].named_parameters():
        if name.endswith(".bias"):
            split = bool(getattr(parameter, "tensor_model_parallel", False))
            found[name] = (split, parameter.numel(), float(parameter.abs().max()), id(parameter) in decayed)
    return found


@pytest.mark.multiprocess
def test_biases_begin_at_zero_are_split_like_their_outputs_and_do_not_decay() -> None:
    parallel = {"tensor": 2, "distributed_optimizer": False}
    found = run_ranks(2, parameters_and_decay, config_of("llama-biases", "vanilla", parallel=parallel))[0]
    assert len(found) == 2 * LAYERS
    for name, (is_split, numbers, largest, decays) in found.items():
        assert largest == 0.0 and not decays, name
        assert (is_split, numbers) == ((True, 32) if "linear_qkv" in name else (False, 32)), name
