"""Gradient checkpointing of the exported code: the same loss and gradients, bit for bit, from less memory.

Bitwise on a CPU, since a layer that is computed again does the same sums in the same order.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments

from tests.hf.test_remote_code import export
from tests.hf.tiny import NAMES, random_ids, tiny_model, vanilla_decoder

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated:FutureWarning")

KINDS = [*NAMES, "vanilla"]
each_way = pytest.mark.parametrize("use_reentrant", [True, False, None], ids=["reentrant", "not-reentrant", "default"])


def _model(kind: str, **changes):
    return (vanilla_decoder(tiny_model(NAMES[0], **changes)) if kind == "vanilla" else tiny_model(kind, **changes)).train()


def _enable(model, use_reentrant) -> None:
    arguments = {} if use_reentrant is None else {"gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    model.gradient_checkpointing_enable(**arguments)


def _step(model, ids_BW, **inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Loss, gradients by name, and the bytes that the forward pass keeps for the backward pass."""
    model.zero_grad()
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids_BW, labels=ids_BW, **inputs).loss
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return loss.detach(), {name: gradient.clone() for name, gradient in gradients.items()}, sum(kept.values())


@each_way
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_without_and_less_is_kept(kind, use_reentrant):
    model, ids = _model(kind), random_ids(2, 45)
    positions = torch.cat([torch.arange(20), torch.arange(25)])[None].expand(2, -1)  # a packed row of two documents
    inputs = {} if kind == "vanilla" else {"position_ids": positions}
    loss, gradients, kept = _step(model, ids, **inputs)
    _enable(model, use_reentrant)
    assert model.is_gradient_checkpointing
    loss_again, gradients_again, kept_less = _step(model, ids, **inputs)
    assert torch.equal(loss_again, loss) and gradients_again.keys() == gradients.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(gradients_again[name], gradient) and gradient.abs().max() > 0 for name, gradient in gradients.items())
    assert kept_less < kept / 2
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing and _step(model, ids, **inputs)[2] == kept


@each_way
@pytest.mark.parametrize("kind", NAMES)
def test_gradients_reach_every_layer_below_frozen_embeddings(kind, use_reentrant):
    model, ids = _model(kind), random_ids(2, 9)
    model.get_input_embeddings().requires_grad_(False)
    _, gradients, _ = _step(model, ids)
    _enable(model, use_reentrant)
    _, gradients_again, _ = _step(model, ids)
    assert "model.layers.0.self_attn.q_proj.weight" in gradients and gradients_again.keys() == gradients.keys()
    assert all(torch.equal(gradients_again[name], gradient) for name, gradient in gradients.items())


def test_a_decoder_without_its_head_that_was_loaded_from_an_export_is_checkpointed_too(tmp_path):
    directory, ids = export(tiny_model("bidirectional-refresh", dtype=torch.float32), tmp_path / "export"), random_ids(2, 9)
    for loaded in (AutoModel.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory).model):
        gradients = []
        for is_enabled in (False, True):
            if is_enabled:
                loaded.gradient_checkpointing_enable()
            loaded.train().zero_grad()
            loaded(ids).last_hidden_state.square().sum().backward()
            gradients.append([weight.grad.clone() for weight in loaded.parameters()])
        assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True)) and len(gradients[0]) > 10


def test_what_is_not_trained_decodes_as_ever():
    model, ids = tiny_model("causal-refresh", dtype=torch.float32), random_ids(1, 6)
    expected = model.generate(ids, max_new_tokens=9, do_sample=False)
    model.gradient_checkpointing_enable()
    assert torch.equal(model.train().generate(ids, max_new_tokens=9, do_sample=False), expected)
    assert model.eval()(ids, use_cache=True).cache is not None


def test_a_cache_in_a_checkpointed_pass_is_left_out_or_refused():
    model, ids = _model("bidirectional-refresh"), random_ids(1, 6)
    with torch.no_grad():
        cache = model(ids, use_cache=True).cache
    model.gradient_checkpointing_enable()
    assert model(ids, use_cache=True).cache is None
    for name in ("cache", "past_key_values"):
        with pytest.raises(ValueError, match=r"found: a cache in a training pass with gradient checkpointing"):
            model(ids[:, :1], **{name: cache})


@pytest.mark.parametrize("kind", ["bidirectional-refresh", "vanilla"])
def test_trainers_flag_trains_the_same_model(kind, tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in random_ids(8, 12)]
    trained = []
    for flag in (False, True):
        model = _model(kind, dtype=torch.float32)
        arguments = TrainingArguments(
            output_dir=str(tmp_path / f"{flag}"),
            gradient_checkpointing=flag,
            max_steps=2,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        Trainer(model=model, args=arguments, train_dataset=rows).train()
        trained.append(model.state_dict())
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])
