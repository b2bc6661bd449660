"""Costs at list prices."""

import math

import pytest

from megatron_dmtd.agents.cost import Prices, cost
from megatron_dmtd.errors import ConfigError
from megatron_dmtd.inference.cache_ops.usage import Usage

USAGE = Usage(prompt_tokens=10_000, cached_tokens=4_000, repos_tokens=3_000, drop_skipped_tokens=2_000, prefill_tokens=1_000)


def test_a_rotated_token_is_billed_as_two_cache_hits_and_a_skipped_one_not_at_all():
    prices = Prices(input=2.0, cached=0.5, output=10.0)
    assert math.isclose(cost(USAGE, 100, prices), (1_000 * 2.0 + 4_000 * 0.5 + 3_000 * 2 * 0.5 + 100 * 10.0) / 1e6)


def test_skipped_tokens_may_have_a_price():
    assert math.isclose(cost(USAGE, 0, Prices(skipped=0.5)) - cost(USAGE, 0), 2_000 * 0.5 / 1e6)


def test_a_cold_request_costs_what_an_ordinary_one_does():
    cold = Usage(prompt_tokens=10_000, prefill_tokens=10_000)
    assert math.isclose(cost(cold, 1_000), (10_000 * Prices().input + 1_000 * Prices().output) / 1e6)


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_impossible_prices_are_refused(value):
    with pytest.raises(ConfigError, match=r"found: a price of .*\(cached\)"):
        Prices(cached=value)
