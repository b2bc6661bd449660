"""The gradient of a step is that of the mean over all valid targets of the global batch, whichever rank holds them; and a step is
the plain one: Hugging Face's model, autograd, clipping and AdamW on the same rows, one by one.

Level of the second: fp32 tolerance; the two add up in another order, and Adam's first steps turn tiny differences of tiny
gradients into steps.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megatron_dmtd.config import Config
from megatron_dmtd.config.decoder import decoder_of
from megatron_dmtd.data.batches.batch import Batch
from megatron_dmtd.parallel.groups import init_parallel
from megatron_dmtd.platform import prepare_megatron
from megatron_dmtd.training.setup import build_run
from megatron_dmtd.training.step import train_step
from tests.support.ranks import run_ranks
from tests.support.tiny import VARIANTS, tiny_config, with_settings

pytestmark = pytest.mark.multiprocess

NUM_ROWS, SEQ_LENGTH = 4, 32
#: valid targets of each row: very different numbers, and one row (one rank's, or one microbatch) without any
UNEVEN = (32, 3, 0, 17)
#: with two ranks of two microbatches each, rank 1 takes rows 1 and 3
EMPTY_RANK = (32, 0, 5, 0)


def rows(valid):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 90, (NUM_ROWS, SEQ_LENGTH + 1), generator=generator)
    loss_mask_BN = (torch.arange(SEQ_LENGTH) < torch.tensor(valid)[:, None]).float()
    return ids[:, :-1], ids[:, 1:], loss_mask_BN


def stream(valid, rank, size):
    """The rank's microbatches of one row each, without end."""
    tokens_BN, labels_BN, loss_mask_BN = rows(valid)
    for nth in itertools.cycle(range(rank, NUM_ROWS, size)):
        one = slice(nth, nth + 1)
        yield Batch(
            tokens_BN=tokens_BN[one],
            labels_BN=labels_BN[one],
            loss_mask_BN=loss_mask_BN[one],
            positions_BN=torch.arange(SEQ_LENGTH)[None],
            document_lengths=((SEQ_LENGTH,),),
        )


def step(valid, size, distributed_optimizer):
    """Loss, gradient norm, and what one step added to each weight."""
    config = tiny_config(
        # so large an epsilon makes Adam's first step proportional to the gradient, so that weights show its scale
        optimizer={"clip_grad": 0.0, "warmup_steps": 0, "eps": 1.0, "lr": 0.1, "min_lr": 0.1, "weight_decay": 0.0},
        parallel={"distributed_optimizer": distributed_optimizer},
        training={"global_batch_size": NUM_ROWS, "micro_batch_size": 1},
    )
    platform = prepare_megatron()
    init_parallel(config, platform)
    run = build_run(config, platform)
    rank = torch.distributed.get_rank()
    parameters = {(nth, name): one for nth, part in enumerate(run.wrapped) for name, one in part.named_parameters()}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    result = train_step(run, stream(valid, rank, size))
    updates = {name: parameter.detach() - before[name] for name, parameter in parameters.items()}
    return result.loss.values().get("loss"), result.grad_norm, updates


def assert_same(one, other):
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    assert one[1] == pytest.approx(other[1], rel=1e-4)
    assert torch.isfinite(torch.tensor(one[1])) and one[1] > 0
    assert max(float(update.abs().max()) for update in one[2].values()) > 1e-3
    for name, update in one[2].items():
        torch.testing.assert_close(update, other[2][name], rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("distributed_optimizer", [False, True])
@pytest.mark.parametrize("valid", [UNEVEN, EMPTY_RANK])
def test_ranks_with_different_numbers_of_targets_or_none_give_the_gradient_of_one_process(valid, distributed_optimizer):
    (alone,) = run_ranks(1, step, valid, 1, distributed_optimizer)
    for result in run_ranks(2, step, valid, 2, distributed_optimizer):
        assert_same(result, alone)


def test_each_target_weighs_the_same_however_many_its_row_holds():
    """The loss is the mean over targets, not the mean of the rows' means."""
    (alone,) = run_ranks(1, step, UNEVEN, 1, False)
    means = [run_ranks(1, step, tuple(n if i == row else 0 for i, n in enumerate(UNEVEN)), 1, False)[0][0] for row in (0, 1, 3)]
    weighted = sum(mean * count for mean, count in zip(means, (32, 3, 17))) / 52
    assert alone[0] == pytest.approx(weighted, rel=1e-5)
    assert abs(weighted - sum(means) / 3) > 1e-3  # the two differ here


def test_a_step_without_any_target_changes_no_weight():
    (result,) = run_ranks(1, step, (0, 0, 0, 0), 1, False)
    assert result[1] == 0.0
    assert all(not update.any() for update in result[2].values())


def megatron_curve(config: Config) -> tuple[dict[str, torch.Tensor], list[Any], list[tuple[float, float, float]]]:
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


def _plain_curve(
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


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_ten_steps_are_those_of_plain_pytorch(variant: str, tied: bool, corpus: tuple[str, str]) -> None:
    config = tiny_config(variant, training={"steps": 10}, model={"tie_word_embeddings": tied, "init_std": 0.02})
    config = with_settings(config, data={"train": (corpus[0],)})
    weights, batches, curve = run_ranks(1, megatron_curve, config)[0]
    plain = _plain_curve(config, weights, batches, [rate for _, _, rate in curve])
    assert curve[0][0] - curve[-1][0] > 0.1, "the model must learn, or the comparison says nothing"
    for (loss, norm, _), (expected_loss, expected_norm) in zip(curve, plain, strict=True):
        assert loss == pytest.approx(expected_loss, abs=2e-4)
        assert norm == pytest.approx(expected_norm, rel=2e-3)
