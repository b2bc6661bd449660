"""Weights of replayed experts against float64, and where their gradient goes."""

import pytest
import torch

from megatron_dmtd.errors import DataError
from megatron_dmtd.rl import replay_weights

LOGITS = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
INDICES = torch.tensor([[4, 0], [1, 2], [2, 1]])


def test_weights_are_a_softmax_over_the_recorded_set_in_its_order():
    found = replay_weights(LOGITS, INDICES)
    for row, indices, weights in zip(LOGITS.double(), INDICES.tolist(), found, strict=True):
        powers = [row[index].exp() for index in indices]
        assert weights.tolist() == pytest.approx([float(power / sum(powers)) for power in powers], rel=1e-6)
    assert torch.equal(replay_weights(LOGITS, INDICES.flip(1).to(torch.uint8)), found.flip(1))


def test_the_gradient_reaches_the_recorded_experts_only_and_is_right():
    logits = LOGITS.double().requires_grad_()
    replay_weights(logits, INDICES)[:, 0].sum().backward()
    outside = torch.ones(3, 5, dtype=torch.bool).scatter(1, INDICES, False)
    assert torch.count_nonzero(logits.grad[outside]) == 0 and (logits.grad[~outside] != 0).all()
    assert torch.autograd.gradcheck(lambda x: replay_weights(x, INDICES), (logits,))


@pytest.mark.parametrize(
    ("indices", "found"),
    [
        ([[0, 5], [0, 1], [0, 1]], "expert 5"),
        ([[0, 1], [-1, 1], [0, 1]], "expert -1"),
        ([[0, 1], [0, 1], [3, 3]], "expert 3 twice"),
        ([[0, 1]], r"\(1, 2\)"),
        ([0, 1, 2], r"\(3,\)"),
        ([[0.0, 1.0]] * 3, "float32"),
        ([[True, False]] * 3, "bool"),
    ],
)
def test_indices_of_another_model_are_refused(indices, found):
    with pytest.raises(DataError, match=found):
        replay_weights(LOGITS, torch.tensor(indices))
