"""The engine's thread, without a server: events, cancellation, limits, faults and the end."""

import asyncio
import contextlib
import threading
from pathlib import Path

import pytest

from megatron_dmtd.errors import DataError
from megatron_dmtd.inference import Engine, EngineConfig, SamplingParams
from megatron_dmtd.serving.faults import OutOfServiceError, OverloadError
from megatron_dmtd.serving.worker import Stream, Worker

LONG = 500
PARAMS = SamplingParams(ignore_eos=True)


@contextlib.contextmanager
def working(folder: Path, *, max_waiting: int = 8, **options):
    engine = Engine(folder, EngineConfig(max_batch=2, cache_tokens=4096), device="cpu")
    worker = Worker(engine, max_waiting=max_waiting, **options)
    try:
        yield worker
    finally:
        worker.close()
        assert not worker._thread.is_alive()


async def until(condition) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


async def tokens_of(stream: Stream) -> list[int]:
    return [event.token_id async for event in stream]


def test_streams_carry_the_tokens_of_the_engine_and_end(folder):
    async def run(worker: Worker) -> list[list[int]]:
        streams = [await worker.submit([5, 6, number], max_new_tokens=7, params=PARAMS) for number in range(4)]
        return list(await asyncio.gather(*map(tokens_of, streams)))

    with working(folder) as worker:
        found = asyncio.run(run(worker))
    alone = Engine(folder, EngineConfig(max_batch=1), device="cpu")
    expected = alone.generate([[5, 6, number] for number in range(4)], max_new_tokens=7, params=PARAMS)
    assert found == [list(completion.token_ids) for completion in expected]


def test_all_samples_of_a_request_come_through_one_stream(folder):
    async def run(worker: Worker) -> dict[int, int]:
        stream = await worker.submit([5], max_new_tokens=4, params=SamplingParams(ignore_eos=True, temperature=1.0, n=3))
        counts: dict[int, int] = {}
        async for event in stream:
            counts[event.sample] = counts.get(event.sample, 0) + 1
        return counts

    with working(folder) as worker:
        assert asyncio.run(run(worker)) == {0: 4, 1: 4, 2: 4}


def test_a_refused_prompt_concerns_its_caller_alone(folder):
    async def run(worker: Worker) -> list[int]:
        stream = await worker.submit([5], max_new_tokens=6, params=PARAMS)
        with pytest.raises(DataError):
            await worker.submit([10**6], max_new_tokens=6, params=PARAMS)
        return await tokens_of(stream)

    with working(folder) as worker:
        assert len(asyncio.run(run(worker))) == 6
        assert (worker.num_running, worker.num_waiting) == (0, 0)


def test_no_more_wait_than_allowed_and_places_come_back(folder):
    async def run(worker: Worker) -> None:
        streams = [await worker.submit([5], max_new_tokens=LONG, params=PARAMS) for _ in range(2)]
        await until(lambda: worker.num_running == 2)
        streams.append(await worker.submit([5], max_new_tokens=LONG, params=PARAMS))
        assert worker.num_waiting == 1
        with pytest.raises(OverloadError, match="1 waiting and 2 running"):
            await worker.submit([5], max_new_tokens=LONG, params=PARAMS)
        for stream in streams:
            stream.close()
            stream.close()  # again, for nothing
        await until(lambda: not worker.engine.has_work)
        assert len(await tokens_of(await worker.submit([5], max_new_tokens=3, params=PARAMS))) == 3

    with working(folder, max_waiting=1) as worker:
        asyncio.run(run(worker))
        worker.engine.check_integrity()


def test_a_caller_that_is_cancelled_while_it_waits_leaves_nothing_behind(folder):
    async def run(worker: Worker) -> None:
        held, go_on = threading.Event(), threading.Event()
        worker._arrive(lambda: (held.set(), go_on.wait(20)))  # the thread is busy
        await until(held.is_set)
        waiting = asyncio.create_task(worker.submit([5], max_new_tokens=LONG, params=PARAMS))
        await asyncio.sleep(0.02)
        waiting.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: worker.num_waiting == 0 and not worker.engine.has_work and not worker._streams)

    with working(folder) as worker:
        asyncio.run(run(worker))


def test_a_step_that_fails_ends_every_request_and_the_service(folder):
    faults = []

    async def run(worker: Worker) -> list[str]:
        streams = [await worker.submit([5], max_new_tokens=LONG, params=PARAMS) for _ in range(2)]

        def fail() -> list:
            raise ZeroDivisionError("a planted fault")

        worker.engine.step = fail
        words = []
        for stream in streams:
            with pytest.raises(OutOfServiceError) as caught:
                await tokens_of(stream)
            words.append(caught.value.found)
        with pytest.raises(OutOfServiceError):
            await worker.submit([5], max_new_tokens=1, params=PARAMS)
        return words

    with working(folder, on_fault=lambda: faults.append(threading.current_thread().name)) as worker:
        words = asyncio.run(run(worker))
        assert words == ["a step of the engine failed: ZeroDivisionError: a planted fault"] * 2
        assert worker.failed
    assert faults == ["engine"]  # told after the requests have ended, by the thread that `close` waits for


def test_closing_ends_what_is_in_progress_and_is_no_fault(folder):
    async def run(worker: Worker) -> str:
        stream = await worker.submit([5], max_new_tokens=LONG, params=PARAMS)
        await asyncio.get_running_loop().run_in_executor(None, worker.close)
        with pytest.raises(OutOfServiceError) as caught:
            await tokens_of(stream)
        return caught.value.found

    with working(folder) as worker:
        assert asyncio.run(run(worker)) == "the server is shutting down"
        assert not worker.failed and worker.out_of_service is not None
        worker.engine.check_integrity()
