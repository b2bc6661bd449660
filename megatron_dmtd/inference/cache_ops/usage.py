"""What a request has cost, in tokens of its prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Counts of prompt tokens: of each at most one of the last four."""

    prompt_tokens: int
    cached_tokens: int = 0
    """Found in the cache and read where they were."""
    repos_tokens: int = 0
    """Found in the cache and read at another position, to which they had to be copied."""
    drop_skipped_tokens: int = 0
    """Found in the cache and read by nothing that had to be computed."""
    prefill_tokens: int
    """Computed."""

    def __getitem__(self, name: str) -> int:
        """The same by name, as in the HTTP API."""
        return int(getattr(self, name))
