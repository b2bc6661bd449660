"""One request in progress: its prompts in the engine, and the answer to its client, complete or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from megatron_dmtd.errors import DataError
from megatron_dmtd.inference.detokenizer import TokenDecoder
from megatron_dmtd.serving.answers import Answer, Piece, Sample, Usage, after, dumped, echoed, joined
from megatron_dmtd.serving.faults import OutOfServiceError, error_body
from megatron_dmtd.serving.metrics import Metrics
from megatron_dmtd.serving.pool import Pool
from megatron_dmtd.serving.preparation import Prepared, Prompt
from megatron_dmtd.serving.worker import Stream, Worker

#: a client that has closed its connection; HTTP has no status for that, so this is nginx's
CLIENT_GONE = 499


class Job:
    """The prompts of one request."""

    def __init__(self, worker: Worker, metrics: Metrics, prepared: Prepared, form: Answer) -> None:
        self._worker, self._metrics, self._form = worker, metrics, form
        self._prompts, self._params = prepared.prompts, prepared.params
        self._max_new_tokens = prepared.max_new_tokens
        self._streams: list[Stream] = []
        self._samples: dict[int, Sample] = {}
        self._arrived_s, self._has_begun, self._is_closed = time.perf_counter(), False, False

    async def submit(self) -> None:
        """Queue all prompts, or, if one is refused, none."""
        found: list[Stream | BaseException] = []
        try:
            queued = (
                self._worker.submit(
                    prompt.ids,
                    max_new_tokens=self._max_new_tokens,
                    params=self._params,
                    cache=None if prompt.program is None else prompt.program.operations,
                )
                for prompt in self._prompts
            )
            found = await asyncio.gather(*queued, return_exceptions=True)
        finally:
            self._streams = [stream for stream in found if isinstance(stream, Stream)]
            if len(self._streams) < len(self._prompts):
                self.close()
        for prompt, error in zip(self._prompts, found, strict=True):
            if isinstance(error, DataError) and prompt.program is not None:  # more at one time than can be cached
                raise prompt.program.named(error) from error
            if isinstance(error, BaseException):
                raise error
        self._metrics.prompt_tokens.inc(sum(len(prompt.ids) for prompt in self._prompts))

    def close(self) -> None:
        """Cancel what is not finished."""
        if self._is_closed:
            return
        self._is_closed = True
        for stream in self._streams:
            stream.close()
        self._metrics.request_s.observe(time.perf_counter() - self._arrived_s)

    async def whole(self, request: Request, pool: Pool, *, echo: TokenDecoder | None) -> Response:
        """The answer when all is done, unless the client disconnects first. `echo`: with the prompts before the outputs."""
        collecting, leaving = asyncio.ensure_future(self._collected()), asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((collecting, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                return Response(status_code=CLIENT_GONE)
            body = await pool.run(self._written, collecting.result(), echo)
            return Response(body, media_type="application/json")
        finally:
            for task in (collecting, leaving):
                task.cancel()
            self.close()

    async def chunks(self, *, with_usage: bool) -> AsyncIterator[str]:
        """Server-sent events."""
        try:
            if self._form.is_chat:
                for index in range(self._params.n * len(self._streams)):
                    yield _sse(self._form.opening(index))
            async for index, piece in self._pieces():
                yield _sse(self._form.chunk(index, piece))
            if with_usage:
                yield _sse(self._form.closing(self._usage()))
            yield "data: [DONE]\n\n"
        except OutOfServiceError as error:
            yield _sse(error_body(str(error), kind="server_error"))
        finally:
            self.close()

    def _written(self, pieces: dict[int, list[Piece]], echo: TokenDecoder | None) -> bytes:
        outputs = [joined(pieces[index]) for index in sorted(pieces)]
        if echo is not None:
            echoes = [self._echo(number, prompt, echo) for number, prompt in enumerate(self._prompts)]
            outputs = [after(echoes[index // self._params.n], output) for index, output in enumerate(outputs)]
        return dumped(self._form.whole(outputs, self._usage())).encode("utf-8")

    def _echo(self, number: int, prompt: Prompt, decoder: TokenDecoder) -> Piece:
        """A prompt before its outputs; the log probabilities of its tokens come with the first of them."""
        return echoed(decoder, prompt.text, prompt.ids, self._samples[number * self._params.n].prompt_logprobs)

    async def _collected(self) -> dict[int, list[Piece]]:
        pieces: dict[int, list[Piece]] = {}
        async for index, piece in self._pieces():
            pieces.setdefault(index, []).append(piece)
        return pieces

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """New text of all samples as it arrives, with the sample's number in the answer."""
        found: asyncio.Queue[tuple[int, Piece] | Exception | None] = asyncio.Queue()
        readers = [asyncio.ensure_future(self._read(number, found)) for number in range(len(self._streams))]
        try:
            num_reading = len(readers)
            while num_reading:
                item = await found.get()
                if item is None:
                    num_reading -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for reader in readers:
                reader.cancel()

    async def _read(self, number: int, found: asyncio.Queue[tuple[int, Piece] | Exception | None]) -> None:
        stream = self._streams[number]
        try:
            async for event in stream:
                index = number * self._params.n + event.sample
                sample = self._samples.setdefault(index, Sample())
                self._note_first_token()
                if (piece := sample.add(event)) is not None:
                    found.put_nowait((index, piece))
        except OutOfServiceError as error:
            found.put_nowait(error)
        else:
            found.put_nowait(None)

    def _note_first_token(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._metrics.first_token_s.observe(time.perf_counter() - self._arrived_s)

    def _usage(self) -> Usage:
        # Of several outputs of a prompt the first one counts: the others find in the cache what it has computed.
        first = [self._samples.get(number * self._params.n) for number in range(len(self._streams))]
        own = [sample.usage for sample in first if sample is not None and sample.usage is not None]
        return Usage(
            prompt_tokens=sum(len(stream.prompt_ids) for stream in self._streams),
            completion_tokens=sum(sample.num_tokens for sample in self._samples.values()),
            cached_tokens=sum(usage.cached_tokens for usage in own),
            repos_tokens=sum(usage.repos_tokens for usage in own),
            drop_skipped_tokens=sum(usage.drop_skipped_tokens for usage in own),
            prefill_tokens=sum(usage.prefill_tokens for usage in own),
        )


class Events(StreamingResponse):
    """A job's answer as server-sent events."""

    def __init__(self, job: Job, *, with_usage: bool) -> None:
        super().__init__(job.chunks(with_usage=with_usage), media_type="text/event-stream")
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `StreamingResponse`. A client may disconnect before the first chunk is requested."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.close()


async def _disconnected(request: Request) -> None:
    """Returns when the client has disconnected. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _sse(fields: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(fields, ensure_ascii=False)}\n\n"
