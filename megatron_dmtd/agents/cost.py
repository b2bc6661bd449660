"""What requests cost at list prices.

Computed tokens of a prompt are billed as input and cached ones as cache hits. Of a token that was moved to another position the
rotation is billed too, as one more cache hit, which overestimates it on purpose (arXiv 2610.28577). What was dropped
and not read is not billed, unless a provider does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from megatron_dmtd.errors import ConfigError
from megatron_dmtd.inference.cache_ops.usage import Usage

_MILLION = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Prices per million tokens, in one currency. The defaults are round numbers in the usual proportions: set your own."""

    input: float = 1.0
    """Of a computed prompt token."""
    cached: float = 0.1
    """Of a cache hit."""
    output: float = 4.0
    """Of a generated token."""
    skipped: float = 0.0
    """Of a cached token that has been dropped and that nothing reads."""

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                found = f"a price of {value} ({field.name})"
                raise ConfigError(
                    found=found, required="a finite number of at least 0", remedy=f"change the price of {field.name}"
                )


def cost(usage: Usage, output_tokens: int, prices: Prices = Prices()) -> float:
    """The price of one request, in the currency of `prices`."""
    millionths = (
        usage.prefill_tokens * prices.input
        + usage.cached_tokens * prices.cached
        + usage.repos_tokens * (prices.cached + prices.cached)
        + usage.drop_skipped_tokens * prices.skipped
        + output_tokens * prices.output
    )
    return millionths / _MILLION
