"""The recipes of published models at their exact shapes, without memory for them: forward and backward on fake tensors.

Fake tensors have shapes and types and no numbers, so that every operation of a step of a 4B model is checked on any machine.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from megatron_dmtd.config import Config, CycleConfig, from_yaml
from megatron_dmtd.config.decoder import decoder_of
from megatron_dmtd.cycle import VARIANTS
from megatron_dmtd.families import ModelDescription, write_fields
from megatron_dmtd.weights.megatron_names import check_megatron, hf_specs, megatron_specs
from megatron_dmtd.weights.specs import spec_of
from tests.support.ranks import run_ranks
from tests.support.tiny import with_settings, write_corpus

ROOT = Path(__file__).parents[2]
#: architecture, and parameters of the published checkpoint
PUBLISHED = {"qwen3-4b": (Qwen3Config, 4_022_468_096), "smollm2-135m": (LlamaConfig, 134_515_008)}
FORMS = [*(("qwen3-4b", variant) for variant in ("vanilla", *VARIANTS)), ("smollm2-135m", "bidirectional-refresh")]


def recipe(name: str, variant: str, **sections) -> Config:
    config = from_yaml(ROOT / "examples" / name / f"{variant}.yaml")
    return with_settings(config, **{"parallel": {"attention_backend": "dense"}, **sections})


def step_of_fakes(forms: list[tuple[str, str]]) -> list[tuple[int, tuple[int, ...], list[str]]]:
    """For each recipe: its parameters, the shape of its losses, and the parameters that got no gradient of their own shape."""
    from megatron_dmtd.attention import select_backend
    from megatron_dmtd.models.model import CycleModel
    from megatron_dmtd.models.transformer_config import transformer_config
    from megatron_dmtd.parallel.groups import init_parallel
    from megatron_dmtd.parallel.placement import place
    from megatron_dmtd.platform import prepare_megatron

    platform = prepare_megatron()
    results = []
    for name, variant in forms:
        config = recipe(name, variant)
        if not results:
            init_parallel(config, platform)
        placement, slots = place(config), 64
        with FakeTensorMode(allow_non_fake_inputs=True):
            (stage,) = placement.stages_of(0)
            model = CycleModel(
                config,
                transformer_config(config, on_cuda=False),
                placement,
                stage,
                backend=select_backend("dense", platform.device, head_dim=config.model.head_dim),
            )
            check_megatron(decoder_of(config.model), {name: spec_of(parameter) for name, parameter in model.named_parameters()})
            tokens, positions = torch.zeros(1, slots, dtype=torch.long), torch.arange(slots)[None]
            loss = model(tokens, positions, tokens, document_lengths=((slots,),))
            loss.sum().backward()
            without = [name for name, p in model.named_parameters() if p.grad is None or p.grad.shape != p.shape]
            results.append((sum(p.numel() for p in model.parameters()), tuple(loss.shape), without))
    return results


@pytest.mark.multiprocess
def test_a_step_of_each_recipe_fits_together_at_full_size():
    (results,) = run_ranks(1, step_of_fakes, FORMS)
    for (name, _), (parameters, loss_shape, without_gradient) in zip(FORMS, results, strict=True):
        assert parameters == PUBLISHED[name][1]
        assert loss_shape == (1, 64)
        assert without_gradient == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_architecture_has_exactly_the_tensors_that_an_import_asks_for(name):
    """transformers builds the ordinary model on the meta device; names and shapes go through the conversion's rules and back."""
    model = recipe(name, "vanilla").model
    fields = write_fields(ModelDescription(model=model, cycle=CycleConfig(variant="vanilla")))
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(PUBLISHED[name][0](**fields))
    published = {key: spec_of(tensor) for key, tensor in built.named_parameters()}
    own = megatron_specs(decoder_of(model), published)
    assert sum(torch.Size(spec.shape).numel() for spec in own.values()) == PUBLISHED[name][1]
    assert hf_specs(decoder_of(model), own) == published


def three_steps(config: Config) -> list[float]:
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training import rows, start
    from megatron_dmtd.training.step import train_step

    run = start.prepare(config, prepare_megatron())
    batches = rows.microbatches(run, rows.open_corpus(config, config.data.train), first_row=0)
    return [train_step(run, batches).loss.values()["loss"] for _ in range(3)]


@pytest.mark.slow
def test_qwen3_4b_with_few_layers_takes_real_steps(tmp_path):
    """Widths, heads and vocabulary of the recipe; 2 + 1 layers: 0.7 billion parameters, 12 GB."""
    config = recipe(
        "qwen3-4b",
        "bidirectional-refresh",
        model={"num_layers": 3},
        cycle={"num_parallel_layers": 2},
        data={"train": (write_corpus(tmp_path / "corpus", num_documents=20),), "valid": (), "seq_length": 32, "tokenizer": ""},
        optimizer={"warmup_steps": 1, "lr": 1e-3},
        training={"precision": "fp32", "micro_batch_size": 1, "global_batch_size": 1},
        parallel={"attention_backend": "dense", "tensor": 1, "pipeline": 1, "sequence_parallel": False},
        checkpoint={"dir": "", "init_from": ""},
        logging={"dir": ""},
    )
    (losses,) = run_ranks(1, three_steps, config)
    assert losses[0] == pytest.approx(torch.log(torch.tensor(151936.0)).item(), abs=1.0)
    # The first step's rate is zero, and each step has other rows.
    assert losses[2] < min(losses[:2]) - 0.3, losses
