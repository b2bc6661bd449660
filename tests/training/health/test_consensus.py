"""What ranks tell each other, on real ranks."""

from typing import Any

import pytest
import torch

from megatron_dmtd.errors import ConfigError, DataError, DMTDError
from megatron_dmtd.training.health.consensus import any_rank, broadcast_from_first, gathered, gathered_on_first, raise_together
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess


def _exchange() -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    return {
        "any": any_rank((rank == 1, False, True), device=torch.device("cpu")),
        "gathered": gathered({"rank": rank}),
        "first": gathered_on_first(rank * 10),
        "told": broadcast_from_first(f"rank {rank} says"),
    }


def test_every_rank_comes_to_the_same_conclusion():
    found = run_ranks(3, _exchange)
    for one in found:
        assert one["any"] == (True, False, True)
        assert one["gathered"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert one["told"] == "rank 0 says"
    assert [one["first"] for one in found] == [[0, 10, 20], [], []]


def _raise(errors: list[DMTDError | None]) -> tuple[str, str]:
    try:
        raise_together(errors[torch.distributed.get_rank()])
    except DMTDError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_the_first_ranks_error_is_raised_on_all_with_its_kind_and_words():
    second = DataError(found="a torn file", required="a whole one", remedy="copy it again")
    third = ConfigError(found="x", required="y", remedy="z")
    found = run_ranks(3, _raise, [None, second, third])
    assert found == [("DataError", "found: rank 1: a torn file\nrequired: a whole one\nremedy: copy it again")] * 3
    assert run_ranks(2, _raise, [None, None]) == [("", "")] * 2
