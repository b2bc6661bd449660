"""The forward pass does the work that the formula counts, and no dead work: matrix products counted by torch."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_dmtd.architecture.flops import visit_weights
from megatron_dmtd.config import Config
from megatron_dmtd.config.decoder import schedule_of
from megatron_dmtd.models.vocab import padded_vocab_size
from tests.models.test_model import megatron_model
from tests.support.oracle_weights import megatron_tensors, wide_weights
from tests.support.ranks import run_ranks
from tests.support.tiny import MASK, VARIANTS, tiny_config


def linear_flops(config: Config) -> int:
    """FLOPs of a forward pass over 2 rows of 32 tokens, attention left out."""
    model = megatron_model(config, megatron_tensors(config, wide_weights(config)))
    tokens = torch.randint(0, MASK, (2, 32))
    positions = torch.arange(32).expand(2, 32)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens, positions, tokens, document_lengths=((32,), (32,)))
    counts = counter.get_flop_counts()["Global"]
    return sum(count for operation, count in counts.items() if "mm" in str(operation))


@pytest.mark.multiprocess
@pytest.mark.parametrize("variant", [*VARIANTS, "vanilla"])
def test_matrix_products_are_those_of_the_formula(variant: str) -> None:
    config = tiny_config(variant)
    schedule = schedule_of(config.model, config.cycle)
    head = padded_vocab_size(config.model.vocab_size) * config.model.hidden_size
    weights = sum(visit_weights(schedule, visit) for visit in schedule.visits) + head
    assert run_ranks(1, linear_flops, config)[0] == 2 * 64 * weights
