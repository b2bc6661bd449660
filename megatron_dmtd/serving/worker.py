"""The engine in a thread of its own, and requests to it from an event loop.

Only that thread touches the engine: it takes what has arrived, runs a step, distributes the new tokens, and begins again. A
request that is refused, or whose client has disconnected, does not affect others. An error in a step affects all of them: every
request ends with it, nothing is served from then on, and the process should exit and be restarted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from megatron_dmtd.inference import Engine, Event, SamplingParams
from megatron_dmtd.serving.faults import OutOfServiceError, OverloadError

_log = logging.getLogger(__name__)


class Stream:
    """The events of one request, to be iterated over. When leaving early, call `close`, as `contextlib.closing` does."""

    def __init__(self, worker: Worker, prompt_ids: list[int], num_samples: int) -> None:
        self.prompt_ids = prompt_ids
        self.request_id = -1
        """The engine's, once it has taken the request."""
        self._worker, self._loop = worker, asyncio.get_running_loop()
        self._found: asyncio.Queue[list[Event] | OutOfServiceError] = asyncio.Queue()
        self._num_unread = self.num_unfinished = num_samples
        """Numbers of samples: the reader's count, and the worker's, which is ahead."""

    def put(self, found: list[Event] | OutOfServiceError) -> None:
        """Called by the worker's thread."""
        _call(self._loop, self._found.put_nowait, found)

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Raises `OutOfServiceError` if the engine fails or the server ends meanwhile."""
        while self._num_unread:
            found = await self._found.get()
            if isinstance(found, OutOfServiceError):
                raise found
            for event in found:
                self._num_unread -= event.completion is not None
                yield event

    def close(self) -> None:
        """Cancel what is not finished."""
        if self._num_unread:
            self._num_unread = 0
            self._worker.cancel(self)


class Worker:
    """Owns an engine. `on_fault` is called in the worker's thread when a step has failed."""

    def __init__(self, engine: Engine, *, max_waiting: int, on_fault: Callable[[], None] = lambda: None) -> None:
        self.engine, self.max_waiting, self._on_fault = engine, max_waiting, on_fault
        self.out_of_service: OutOfServiceError | None = None
        """Why requests are no longer served; None if they are."""
        self.failed = False
        """Whether the reason is a fault of the engine."""
        self._streams: dict[int, Stream] = {}
        self._condition = threading.Condition()
        # Guarded by the condition:
        self._arrived: list[Callable[[], None]] = []
        self._num_arriving = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # Called by the event loop.

    @property
    def num_waiting(self) -> int:
        """Samples that have no place in the batch yet."""
        return len(self.engine.scheduler.waiting) + self._num_arriving

    @property
    def num_running(self) -> int:
        """Samples in the batch."""
        return len(self.engine.scheduler.running)

    async def submit(
        self, prompt_ids: list[int], *, max_new_tokens: int, params: SamplingParams, cache: list[Any] | None = None
    ) -> Stream:
        """Queue a prompt. `cache`: see `Engine.submit`.

        Raises:
            OverloadError: Too many wait.
            OutOfServiceError: Nothing is served any more.
            DataError, ConfigError, CheckpointError: See `Engine.submit`.
        """
        num_free = self.engine.config.max_batch - self.num_running
        if self.num_waiting + params.n > self.max_waiting + num_free:
            raise OverloadError(
                found=f"{params.n} more in addition to {self.num_waiting} waiting and {self.num_running} running",
                required=f"at most {self.max_waiting} waiting for a place in the batch of {self.engine.config.max_batch}",
                remedy="try again later, or start the server with a larger --max-waiting",
            )
        stream = Stream(self, prompt_ids, params.n)
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take() -> None:
            error: Exception | None = self.out_of_service
            try:
                if error is None:
                    stream.request_id = self.engine.submit(prompt_ids, max_new_tokens=max_new_tokens, params=params, cache=cache)
                    self._streams[stream.request_id] = stream
            except Exception as refusal:  # whatever it is, it concerns only this caller
                error = refusal
            with self._condition:
                self._num_arriving -= params.n
            _call(stream._loop, _settle, taken, error)

        self._arrive(take, num_samples=params.n)
        try:
            await taken
        except asyncio.CancelledError:
            stream.close()
            raise
        return stream

    def cancel(self, stream: Stream) -> None:
        """Stop a request. One that is finished or was never taken is left alone."""

        def drop() -> None:
            if self._streams.pop(stream.request_id, None) is not None:
                self.engine.cancel(stream.request_id)

        if self.out_of_service is None:
            self._arrive(drop)

    def close(self) -> None:
        """End all requests, and the thread."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        self._thread.join()

    def _arrive(self, action: Callable[[], None], *, num_samples: int = 0) -> None:
        """Have `action` called by the worker's thread between two steps, or at once if requests are no longer served."""
        with self._condition:
            self._num_arriving += num_samples
            if self.out_of_service is None:
                self._arrived.append(action)
                self._condition.notify()
                return
        action()

    # The worker's thread.

    def _run(self) -> None:
        try:
            while not self._is_closing:
                for action in self._wait():
                    action()
                self._hand_out(self.engine.step())
        except Exception as error:
            _log.exception("a step of the engine failed; all requests end")
            self.failed = True
            found = f"a step of the engine failed: {type(error).__name__}: {error}"
            remedy = "start the server again; it has logged where the step failed"
            self._end(OutOfServiceError(found=found, required="an engine that works", remedy=remedy))
            self._on_fault()
        else:
            for request_id in self._streams:
                self.engine.cancel(request_id)
            remedy = "try again when it is back"
            self._end(OutOfServiceError(found="the server is shutting down", required="one that runs", remedy=remedy))

    def _wait(self) -> list[Callable[[], None]]:
        """What has arrived, once something has or there is work."""
        with self._condition:
            self._condition.wait_for(lambda: self._arrived or self._is_closing or self.engine.has_work)
            arrived, self._arrived = self._arrived, []
        return arrived

    def _hand_out(self, events: list[Event]) -> None:
        by_request: dict[int, list[Event]] = {}
        for event in events:
            by_request.setdefault(event.request_id, []).append(event)
        for request_id, own in by_request.items():
            stream = self._streams[request_id]
            stream.num_unfinished -= sum(event.completion is not None for event in own)
            if not stream.num_unfinished:
                del self._streams[request_id]
            stream.put(own)

    def _end(self, reason: OutOfServiceError) -> None:
        with self._condition:
            self.out_of_service = reason
            arrived, self._arrived = self._arrived, []
        for action in arrived:
            action()
        for stream in self._streams.values():
            stream.put(reason)
        self._streams.clear()


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    """Schedule a call in the loop; a closed loop no longer has a reader."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():  # its caller is gone
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
