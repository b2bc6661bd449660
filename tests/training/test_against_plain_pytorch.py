"""Megatron's training step is the plain one: Hugging Face's model, autograd, clipping and AdamW on the same rows, one by one.

Level: fp32 tolerance; the two add up in another order, and Adam's first steps turn tiny differences of tiny gradients into steps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_dmtd.config import Config
from megatron_dmtd.config.decoder import decoder_of
from tests.support.ranks import run_ranks
from tests.support.tiny import VARIANTS, tiny_config, with_settings


def megatron_run(config: Config) -> tuple[dict[str, torch.Tensor], list[Any], list[tuple[float, float, float]]]:
    """Initial weights by their own names, the batches of each step, and its loss, gradient norm and learning rate."""
    from megatron_dmtd.platform import prepare_megatron
    from megatron_dmtd.training import rows, start
    from megatron_dmtd.training.step import train_step

    run = start.prepare(config, prepare_megatron())
    weights = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
    dataset = rows.open_corpus(config, config.data.train)
    batches = list(
        zip(
            range(config.training.steps * run.num_microbatches(run.batch_size)),
            rows.microbatches(run, dataset, first_row=0),
            strict=False,
        )
    )
    iterator = rows.microbatches(run, dataset, first_row=0)
    results = [train_step(run, iterator) for _ in range(config.training.steps)]
    curve = [(result.loss.values()["loss"], result.grad_norm, result.lr) for result in results]
    return weights, [(b.tokens_BN, b.labels_BN, b.loss_mask_BN, b.positions_BN) for _, b in batches], curve


def _plain_run(
    config: Config, weights: dict[str, torch.Tensor], batches: list[Any], rates: list[float]
) -> list[tuple[float, float]]:
    from megatron_dmtd.families import ModelDescription, write_fields
    from megatron_dmtd.hf import DMTDQwen3Config, DMTDQwen3ForCausalLM
    from megatron_dmtd.weights.megatron_names import to_hf

    model = DMTDQwen3ForCausalLM(DMTDQwen3Config(**write_fields(ModelDescription(model=config.model, cycle=config.cycle))))
    model.load_state_dict(to_hf(decoder_of(config.model), weights), strict=False)
    model.tie_weights()
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    exempt = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": exempt, "weight_decay": 0.0}],
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    per_step = len(batches) // len(rates)
    curve = []
    for step, rate in enumerate(rates):
        optimizer.zero_grad()
        total, targets = torch.zeros(()), 0.0
        for tokens, labels, mask, positions in batches[step * per_step : (step + 1) * per_step]:
            logits = model(tokens, position_ids=positions, use_cache=False).logits
            losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
            total, targets = total + (losses * mask).sum(), targets + mask.sum().item()
        (total / targets).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        curve.append((total.item() / targets, norm.item()))
    return curve


@pytest.mark.multiprocess
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_ten_steps_are_those_of_plain_pytorch(variant: str, tied: bool, corpus: tuple[str, str]) -> None:
    config = tiny_config(variant, training={"steps": 10}, model={"tie_word_embeddings": tied, "init_std": 0.02})
    config = with_settings(config, data={"train": (corpus[0],)})
    weights, batches, curve = run_ranks(1, megatron_run, config)[0]
    plain = _plain_run(config, weights, batches, [rate for _, _, rate in curve])
    assert curve[0][0] - curve[-1][0] > 0.1, "the model must learn, or the comparison says nothing"
    for (loss, norm, _), (expected_loss, expected_norm) in zip(curve, plain, strict=True):
        assert loss == pytest.approx(expected_loss, abs=2e-4)
        assert norm == pytest.approx(expected_norm, rel=2e-3)
