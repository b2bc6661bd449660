"""Work that takes too long for an event loop, in a few threads: parsing, templates, tokenization, large answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from megatron_dmtd.serving.faults import OverloadError

P = ParamSpec("P")
T = TypeVar("T")

#: More threads would only compete with each other and with the event loop.
NUM_THREADS = 2


class Pool:
    """A few threads, and a limit on the queue for them. Called only by the event loop."""

    def __init__(self, *, max_jobs: int) -> None:
        self.max_jobs = max_jobs
        self.num_jobs = 0
        """Accepted by `admit` and not done."""
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="serving")

    async def admit(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call a function in a thread. Raises `OverloadError` if too many wait, and whatever it raises."""
        if self.num_jobs >= self.max_jobs:
            raise OverloadError(
                found=f"{self.num_jobs} requests being read",
                required=f"at most {self.max_jobs} at once",
                remedy="try again later, or start the server with a larger --max-waiting",
            )
        self.num_jobs += 1
        try:
            return await self.run(function, *arguments, **named)
        finally:
            self.num_jobs -= 1

    async def run(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """The same for work that can no longer be refused."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*arguments, **named))

    def close(self) -> None:
        """Wait for running work, and drop the queue."""
        self._executor.shutdown(wait=False, cancel_futures=True)
