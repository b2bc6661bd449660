"""A few threads, a limit on what waits for them, and nothing lost."""

import asyncio
import threading

import pytest

from megatron_dmtd.serving.faults import OverloadError
from megatron_dmtd.serving.pool import Pool


def test_more_than_the_limit_are_refused_at_once_and_taken_again_later():
    pool, may_end = Pool(max_jobs=3), threading.Event()

    async def use() -> None:
        running = [asyncio.ensure_future(pool.admit(may_end.wait, 20)) for _ in range(3)]
        await asyncio.sleep(0.01)
        with pytest.raises(OverloadError, match="found: 3 requests being read"):
            await pool.admit(int)
        late = asyncio.ensure_future(pool.run(int, "5", base=8))  # answers are never refused
        may_end.set()
        assert await asyncio.gather(*running) == [True] * 3 and await late == 5
        assert pool.num_jobs == 0 and await pool.admit(str, 1) == "1"

    asyncio.run(use())
    pool.close()


def test_a_fault_of_a_job_is_its_callers():
    pool = Pool(max_jobs=1)

    async def use() -> None:
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await pool.admit(lambda: 1 / 0)

    asyncio.run(use())
    pool.close()
