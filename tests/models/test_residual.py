"""Normalized layers and loops: the model is transformers' Dory, and a loop is the stack that repeats its layers.

Level: fp32 tolerance against transformers' model in fp64, whose norms and rotary angles are fp32 too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_dmtd.config import Config
from tests.models.looped import dory_config, published_dory, published_names, random_dory
from tests.models.test_model import megatron_gradients, megatron_logits, megatron_model
from tests.support.oracle_weights import megatron_tensors, wide_weights
from tests.support.ranks import run_ranks
from tests.support.tiny import MASK, VARIANTS, tiny_config


def _tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, MASK, shape, generator=torch.Generator().manual_seed(seed))


def _fp32(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in weights.items()}


@pytest.mark.multiprocess
@pytest.mark.parametrize("num_loops", [1, 2, 4])
def test_logits_equal_those_of_transformers(num_loops: int) -> None:
    config = dory_config(num_loops=num_loops)
    weights = random_dory(config.model)
    tokens = _tokens(2, 32)
    found = run_ranks(1, megatron_logits, config, _fp32(weights), tokens, (32,))[0]
    with torch.no_grad():
        expected = published_dory(config.model, weights).eval()(tokens).logits
    assert expected.std() > 1, "logits that are all alike would agree with anything"
    torch.testing.assert_close(found.double(), expected.double(), atol=1e-4, rtol=0)


@pytest.mark.multiprocess
def test_gradients_equal_those_of_transformers() -> None:
    config = dory_config(num_loops=3)
    weights = random_dory(config.model)
    tokens = _tokens(1, 32, seed=1)
    found = published_names(config.model, run_ranks(1, megatron_gradients, config, _fp32(weights), tokens)[0])
    reference = published_dory(config.model, weights)
    (reference(tokens, labels=tokens).loss * 31).backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient is not None and gradient.abs().max() > 1e-4, f"{name} has no gradient to compare"
        error = (found[name].double() - gradient).abs().max() / gradient.abs().max()
        assert error < 1e-4, (name, error.item())


# --- a loop is the stack that repeats its layers -----------------------------------------------------------------------------

NUM_LOOPS = 3
#: Layers of the loop in a model of four, whose first two are parallel: (before it, in it).
PLACES = {"parallel": (0, 2), "sequential": (2, 2), "last parallel": (1, 1), "after the split": (3, 1)}


def looped_config(variant: str, place: str, injection: str, **parallel: Any) -> Config:
    before, inside = PLACES[place]
    loop = {"num_input_layers": before, "num_recurrent_layers": inside, "num_loops": NUM_LOOPS, "injection": injection}
    return tiny_config(variant, model=loop, parallel=parallel)


def _origins(config: Config) -> list[int]:
    """The layer of the looped model that each layer of the straight one is a copy of."""
    model = config.model
    first, end = model.num_input_layers, model.num_input_layers + model.num_recurrent_layers
    return [*range(end), *(NUM_LOOPS - 1) * [*range(first, end)], *range(end, model.num_layers)]


def _straight(config: Config, own: dict[str, torch.Tensor]) -> tuple[Config, dict[str, torch.Tensor]]:
    """The decoder without a loop whose layers are repeated instead."""
    origins = _origins(config)
    model = replace(config.model, num_layers=len(origins), num_loops=1, num_recurrent_layers=0, num_input_layers=0)
    parallel = sum(origin < config.cycle.num_parallel_layers for origin in origins)
    found = {name: own[name] for name in own if not name.startswith(("decoder.layers.", "decoder.injection."))}
    for index, origin in enumerate(origins):
        for name, tensor in own.items():
            if name.startswith(f"decoder.layers.{origin}."):
                found[name.replace(f"layers.{origin}.", f"layers.{index}.", 1)] = tensor
    return replace(config, model=model, cycle=replace(config.cycle, num_parallel_layers=parallel)), found


def _outcome(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and gradients of the summed loss."""
    slots = tokens.shape[1]
    lengths, positions = ((slots,),) * len(tokens), torch.arange(slots).expand_as(tokens)
    with torch.no_grad():
        logits = model(tokens, positions, document_lengths=lengths)
    model(tokens, positions, tokens.roll(-1, dims=1), document_lengths=lengths)[:, :-1].sum().backward()
    return logits, {name: parameter.grad for name, parameter in model.named_parameters()}


def looped_outcome(config: Config, own: dict[str, torch.Tensor], tokens: torch.Tensor) -> Any:
    model = megatron_model(config, own)
    return _outcome(model.train(config.parallel.recompute != "none"), tokens)


def straight_outcome(config: Config, own: dict[str, torch.Tensor], tokens: torch.Tensor) -> Any:
    """The same from the straight decoder, with sums over the copies of a layer. `add`: hooks add what reached the loop."""
    model = megatron_model(*_straight(config, own))
    if config.model.injection == "add":
        reached: list[torch.Tensor] = []

        def keep(_: Any, __: Any, keywords: dict[str, Any]) -> None:
            reached[:] = [keywords["hidden_states"]]

        def add(_: Any, __: Any, keywords: dict[str, Any]) -> Any:
            return (), keywords | {"hidden_states": keywords["hidden_states"] + reached[0]}

        first, size = config.model.num_input_layers, config.model.num_recurrent_layers
        model.decoder.layers[first].register_forward_pre_hook(keep, with_kwargs=True)
        for run in range(1, NUM_LOOPS):
            model.decoder.layers[first + run * size].register_forward_pre_hook(add, with_kwargs=True)
    logits, gradients = _outcome(model, tokens)
    summed: dict[str, torch.Tensor] = {}
    for name, gradient in gradients.items():
        if name.startswith("decoder.layers."):
            index = name.split(".")[2]
            name = name.replace(f"layers.{index}.", f"layers.{_origins(config)[int(index)]}.", 1)
        summed[name] = summed[name] + gradient if name in summed else gradient
    return logits, summed


def _weights(config: Config) -> dict[str, torch.Tensor]:
    """Random ones; a linear injection passes on the state of the last run alone."""
    straight = replace(config, model=replace(config.model, num_recurrent_layers=0, num_loops=1))
    own = megatron_tensors(straight, {name: 0.5 * tensor for name, tensor in wide_weights(straight).items()})
    if config.model.injection == "concat_linear":
        eye = torch.eye(config.model.hidden_size)
        own["decoder.injection.weight"] = torch.cat((eye, torch.zeros_like(eye)), dim=1)
    return own


def _assert_same(found: Any, expected: Any, *, tolerance: float = 1e-4) -> None:
    (logits, gradients), (expected_logits, expected_gradients) = found, expected
    torch.testing.assert_close(logits, expected_logits, atol=tolerance, rtol=1e-4)
    for name, gradient in expected_gradients.items():
        error = (gradients[name] - gradient).abs().max() / gradient.abs().max()
        assert gradient.abs().max() > 0 and error < tolerance, (name, error)


@pytest.mark.multiprocess
@pytest.mark.parametrize("injection", ["add", "concat_linear"])
@pytest.mark.parametrize(
    ("variant", "place"),
    [(variant, place) for variant in VARIANTS for place in ("parallel", "sequential")]
    + [("vanilla", "parallel"), ("causal-refresh", "last parallel"), ("bidirectional-norefresh", "after the split")],
)
def test_a_loop_is_the_stack_that_repeats_its_layers(variant: str, place: str, injection: str) -> None:
    config = looped_config(variant, place, injection)
    own, tokens = _weights(config), _tokens(2, 32, seed=2)
    found = run_ranks(1, looped_outcome, config, own, tokens)[0]
    _assert_same(found, run_ranks(1, straight_outcome, config, own, tokens)[0])
    assert injection == "add" or found[1]["decoder.injection.weight"].abs().max() > 0


@pytest.mark.multiprocess
def test_one_loop_is_the_straight_stack() -> None:
    looped = looped_config("bidirectional-refresh", "parallel", "add")
    once = replace(looped, model=replace(looped.model, num_loops=1))
    own, tokens = _weights(looped), _tokens(1, 32, seed=3)
    straight = replace(looped, model=replace(looped.model, num_loops=1, num_recurrent_layers=0))
    assert torch.equal(
        run_ranks(1, megatron_logits, once, own, tokens, (32,))[0], run_ranks(1, megatron_logits, straight, own, tokens, (32,))[0]
    )


@pytest.mark.multiprocess
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_gives_the_same_bits(recompute: str) -> None:
    plain = dory_config("bidirectional-refresh", num_loops=3)
    again = dory_config("bidirectional-refresh", num_loops=3, parallel={"recompute": recompute})
    own, tokens = _fp32(random_dory(plain.model)), _tokens(1, 32, seed=4)
    first, second = (run_ranks(1, looped_outcome, config, own, tokens)[0] for config in (plain, again))
    assert torch.equal(first[0], second[0])
    for name, gradient in first[1].items():
        # Added up in another order, run by run.
        torch.testing.assert_close(second[1][name], gradient, atol=1e-6 * float(gradient.abs().max()), rtol=1e-5)


def truncated_outcome(config: Config, own: dict[str, torch.Tensor], tokens: torch.Tensor, num_with_gradient: int) -> Any:
    from megatron_dmtd.models.block import Loops

    model = megatron_model(config, own)
    model.decoder.loops = Loops(num_loops=NUM_LOOPS, num_with_gradient=num_with_gradient)
    return _outcome(model, tokens)


@pytest.mark.multiprocess
def test_gradients_flow_through_the_last_runs_only() -> None:
    config = looped_config("vanilla", "parallel", "add")
    own, tokens = _weights(config), _tokens(1, 32, seed=5)
    whole, all_runs, last = (run_ranks(1, truncated_outcome, config, own, tokens, number)[0] for number in (0, NUM_LOOPS, 1))
    _assert_same(all_runs, whole, tolerance=1e-7)
    assert torch.equal(last[0], whole[0])
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert last[1][name].abs().max() > 0 and not torch.allclose(last[1][name], whole[1][name], rtol=1e-2)
    assert torch.equal(last[1]["decoder.layers.3.mlp.linear_fc1.weight"], whole[1]["decoder.layers.3.mlp.linear_fc1.weight"])
