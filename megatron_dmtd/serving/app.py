"""The HTTP application: routes, refusals and streams. Tokens come from the worker, forms from `answers`."""

from __future__ import annotations

import asyncio
import difflib
import hmac
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_dmtd.errors import ConfigError, DataError, DMTDError
from megatron_dmtd.inference import SamplingParams
from megatron_dmtd.inference.text import encode
from megatron_dmtd.serving.answers import Answer, Piece, Sample, Usage, after, echoed, joined
from megatron_dmtd.serving.metrics import Metrics
from megatron_dmtd.serving.requests import ChatRequest, CompletionRequest, GenerationRequest
from megatron_dmtd.serving.worker import OutOfServiceError, OverloadError, Stream, Worker

#: a client that closes its connection; nginx's status, as HTTP has none
_CLIENT_GONE = 499


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """What clients see of a server."""

    model_name: str
    """The name that requests and answers give the model."""
    api_key: str | None = None
    """What clients must send as a bearer token; None: nothing."""
    defaults: Mapping[str, float]
    """Of temperature, top_p, top_k, min_p and repetition_penalty, where a request names none."""


def make_app(worker: Worker, config: ServerConfig) -> FastAPI:
    """The application over a worker, which it closes at its end."""
    service = _Service(worker, config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            worker.close()

    app = FastAPI(title="megatron_dmtd", lifespan=lifespan)

    app.add_middleware(_Door, service=service)

    @app.exception_handler(RequestValidationError)
    async def refuse_fields(_: Request, error: RequestValidationError) -> Response:
        return _error(400, _in_words(error), kind="invalid_request_error")

    @app.exception_handler(HTTPException)
    async def refuse_address(_: Request, error: HTTPException) -> Response:
        return _error(error.status_code, str(error.detail), kind="invalid_request_error")

    @app.exception_handler(DMTDError)
    async def refuse(_: Request, error: DMTDError) -> Response:
        return _refusal(error)

    @app.exception_handler(Exception)
    async def confess(_: Request, error: Exception) -> Response:
        return _error(500, f"{type(error).__name__}: the server has logged it", kind="server_error")

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        prompts = [Prompt(service.ids_of(prompt), prompt if isinstance(prompt, str) else None) for prompt in body.prompts]
        return await service.answer(request, body, prompts, body.max_tokens)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        ids = service.ids_of_chat(body)
        room = max(service.worker.engine.max_length - len(ids), 1)
        return await service.answer(request, body, [Prompt(ids)], room if body.most_tokens is None else body.most_tokens)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [service.model_card]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(service.model_card)

    @app.get("/health")
    async def health() -> Response:
        reason = worker.out_of_service
        return Response(status_code=200) if reason is None else _refusal(reason)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be continued."""

    ids: list[int]
    text: str | None = None
    """None where it came as ids."""


class UnknownModelError(ConfigError):
    """A request for another model than the one that is served."""


class _Door:
    """Asks for the key, and counts answers. A `BaseHTTPMiddleware` would hide from streams that their client has gone."""

    def __init__(self, app: ASGIApp, *, service: _Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._service.metrics.answers.labels(path=_route_of(scope), status=message["status"]).inc()
            await send(message)

        app: ASGIApp = self._app
        if scope["path"].startswith("/v1/") and not self._service.knows(Headers(scope=scope).get("authorization", "")):
            app = _error(401, "the API key is absent or wrong: send it as a bearer token", kind="authentication_error")
        await app(scope, receive, counted)


class _Service:
    def __init__(self, worker: Worker, config: ServerConfig) -> None:
        self.worker, self.config, self.metrics = worker, config, Metrics(worker)
        self.tokenizer = worker.engine.tokenizer
        # Switched off here once, they are never set again by a call; so two threads may use it at once.
        self.tokenizer.backend_tokenizer.no_truncation()
        self.tokenizer.backend_tokenizer.no_padding()
        self._started = int(time.time())

    @property
    def model_card(self) -> dict[str, Any]:
        return {
            "id": self.config.model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "megatron_dmtd",
            "max_model_len": self.worker.engine.max_length,
        }

    def knows(self, authorization: str) -> bool:
        key = self.config.api_key
        return key is None or hmac.compare_digest(authorization.encode(), f"Bearer {key}".encode())

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.config.model_name):
            raise UnknownModelError(
                found=f"model {name!r}", required=self.config.model_name, remedy="name that model, or none; see /v1/models"
            )

    def ids_of(self, prompt: str | Sequence[int]) -> list[int]:
        return encode(self.tokenizer, prompt) if isinstance(prompt, str) else list(prompt)

    def ids_of_chat(self, body: ChatRequest) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise DataError(
                found="a model whose tokenizer has no chat template",
                required="one, to write a chat as a text",
                remedy="use /v1/completions, or put a chat template into the model's directory",
            )
        messages = [message.for_template() for message in body.messages]
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **body.chat_template_kwargs
            )
        except Exception as error:  # templates are programs, and raise what they like
            raise DataError(
                found=f"messages that the model's chat template refuses: {type(error).__name__}: {error}",
                required="roles in an order that it knows",
                remedy="change the messages",
            ) from error
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    async def answer(self, request: Request, body: GenerationRequest, prompts: list[Prompt], max_new_tokens: int) -> Response:
        self.check_model(body.model)
        params = body.sampling_params(self.config.defaults)
        form = Answer(
            tokenizer=self.tokenizer,
            model=self.config.model_name,
            is_chat=isinstance(body, ChatRequest),
            with_logprobs=params.logprobs is not None,
        )
        job = _Job(self, params, form)
        await job.submit(prompts, max_new_tokens)
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            return StreamingResponse(job.chunks(with_usage=with_usage), media_type="text/event-stream")
        return await job.whole(request, echo=isinstance(body, CompletionRequest) and body.echo)


class _Job:
    """The prompts of one request."""

    def __init__(self, service: _Service, params: SamplingParams, form: Answer) -> None:
        self._service, self._params, self._form = service, params, form
        self._prompts: list[Prompt] = []
        self._streams: list[Stream] = []
        self._samples: dict[int, Sample] = {}
        self._arrived_s, self._has_begun = time.perf_counter(), False

    async def submit(self, prompts: list[Prompt], max_new_tokens: int) -> None:
        """All prompts, or, if one is refused, none."""
        self._prompts = prompts
        found: list[Stream | BaseException] = []
        try:
            queued = (self._service.worker.submit(one.ids, max_new_tokens=max_new_tokens, params=self._params) for one in prompts)
            found = await asyncio.gather(*queued, return_exceptions=True)
        finally:
            self._streams = [stream for stream in found if isinstance(stream, Stream)]
            if len(self._streams) < len(prompts):
                self.close()
        for error in found:
            if isinstance(error, BaseException):
                raise error
        self._service.metrics.prompt_tokens.inc(sum(len(prompt.ids) for prompt in prompts))

    def close(self) -> None:
        """Cancel what is not finished."""
        for stream in self._streams:
            stream.close()
        self._service.metrics.request_s.observe(time.perf_counter() - self._arrived_s)

    async def whole(self, request: Request, *, echo: bool) -> Response:
        """The answer when all is done, unless the client goes first. `echo`: with the prompts before the outputs."""
        collecting, leaving = asyncio.ensure_future(self._outputs(echo=echo)), asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((collecting, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                return Response(status_code=_CLIENT_GONE)
            return JSONResponse(self._form.whole(collecting.result(), self._usage()))
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
            yield _sse(_error_body(str(error), kind="server_error"))
        finally:
            self.close()

    async def _outputs(self, *, echo: bool) -> list[Piece]:
        pieces: dict[int, list[Piece]] = {}
        async for index, piece in self._pieces():
            pieces.setdefault(index, []).append(piece)
        return [after(self._echo(index), joined(pieces[index])) if echo else joined(pieces[index]) for index in sorted(pieces)]

    def _echo(self, index: int) -> Piece:
        number = index // self._params.n
        prompt, first_sample = self._prompts[number], self._samples[number * self._params.n]
        return echoed(self._service.worker.engine.token_decoder, prompt.text, prompt.ids, first_sample.prompt_logprobs)

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """New text of all samples as it comes, with the sample's number in the answer."""
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

    async def _read(self, number: int, found: asyncio.Queue) -> None:
        stream = self._streams[number]
        try:
            async for event in stream:
                index = number * self._params.n + event.sample
                if index not in self._samples:
                    self._samples[index] = Sample()
                self._note_first_token()
                if (piece := self._samples[index].add(event)) is not None:
                    found.put_nowait((index, piece))
        except OutOfServiceError as error:
            found.put_nowait(error)
        else:
            found.put_nowait(None)

    def _note_first_token(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._service.metrics.first_token_s.observe(time.perf_counter() - self._arrived_s)

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=sum(len(stream.prompt_ids) for stream in self._streams),
            completion_tokens=sum(sample.num_tokens for sample in self._samples.values()),
        )


async def _disconnected(request: Request) -> None:
    """Returns when the client has gone. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _route_of(scope: Scope) -> str:
    """The route's pattern: addresses that nobody serves must not each become a metric of their own."""
    return getattr(scope.get("route"), "path", "other")


def _sse(fields: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(fields, ensure_ascii=False)}\n\n"


def _error_body(message: str, *, kind: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def _error(status: int, message: str, *, kind: str) -> Response:
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse(_error_body(message, kind=kind), status_code=status, headers=headers)


def _refusal(error: DMTDError) -> Response:
    if isinstance(error, OverloadError):
        return _error(429, str(error), kind="overloaded")
    if isinstance(error, OutOfServiceError):
        return _error(503, str(error), kind="server_error")
    status = 404 if isinstance(error, UnknownModelError) else 400
    return _error(status, str(error), kind="invalid_request_error")


def _in_words(error: RequestValidationError) -> str:
    known = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields})
    faults = []
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"] if part != "body")
        if item["type"] == "json_invalid":
            faults.append(f"a body that is no JSON, at character {place}: {item['ctx']['error']}")
        elif item["type"] == "extra_forbidden":
            closest = difflib.get_close_matches(place, known, n=1)
            faults.append(f"an unknown field {place}" + (f"; closest: {closest[0]}" if closest else ""))
        else:
            faults.append(f"{place or 'the body'}: {item['msg']}")
    return f"found: {'; '.join(faults)}\nrequired: a JSON object with fields of this route\nremedy: see /docs for all of them"
