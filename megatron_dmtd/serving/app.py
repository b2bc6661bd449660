"""The HTTP application: routes, the key, and refusals. What a request means is in `preparation`, its tokens come from `jobs`."""

from __future__ import annotations

import gc
import hmac
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_dmtd.errors import DMTDError
from megatron_dmtd.serving.answers import Answer
from megatron_dmtd.serving.bodies import read_body
from megatron_dmtd.serving.faults import error_response, refusal
from megatron_dmtd.serving.jobs import CLIENT_GONE, Events, Job
from megatron_dmtd.serving.metrics import Metrics
from megatron_dmtd.serving.openapi import schema_of
from megatron_dmtd.serving.pool import Pool
from megatron_dmtd.serving.preparation import Preparation
from megatron_dmtd.serving.requests import ChatRequest, CompletionRequest, GenerationRequest
from megatron_dmtd.serving.worker import Worker

#: Bytes of a body for each token of the model's longest text, and the smallest limit: parsing JSON blocks everything else.
_BODY_BYTES_PER_TOKEN, _MIN_BODY_BYTES = 16, 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """What clients see of a server."""

    model_name: str
    """The model's name in requests and answers."""
    api_key: str | None = None
    """The bearer token that clients must send; None: none."""
    defaults: Mapping[str, float]
    """Values of temperature, top_p, top_k, min_p and repetition_penalty for requests that do not set them."""
    max_body_bytes: int | None = None
    """Largest body of a request. Default: 16 for each token of `max_length`, at least 1 MiB."""


def make_app(worker: Worker, config: ServerConfig) -> FastAPI:
    """The application around a worker, which it closes at the end."""
    service = _Service(worker, config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # A full garbage collection would traverse everything loaded so far, and all requests would have to wait.
        gc.collect()
        gc.freeze()
        try:
            yield
        finally:
            gc.unfreeze()
            worker.close()
            service.pool.close()

    app = FastAPI(title="megatron_dmtd", lifespan=lifespan)
    app.openapi = lambda: service.schema  # type: ignore[method-assign]
    app.add_middleware(_Gate, service=service)
    _add_handlers(app)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await service.answer(request, CompletionRequest)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await service.answer(request, ChatRequest)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [service.model_card]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request) -> Response:
        service.preparation.check_model(request.path_params["name"])
        return JSONResponse(service.model_card)

    @app.get("/health")
    async def health() -> Response:
        reason = worker.out_of_service
        return Response(status_code=200) if reason is None else refusal(reason)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app


def _add_handlers(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def refuse_address(_: Request, error: HTTPException) -> Response:
        return error_response(error.status_code, str(error.detail), kind="invalid_request_error", headers=error.headers or {})

    @app.exception_handler(DMTDError)
    async def refuse(_: Request, error: DMTDError) -> Response:
        return refusal(error)

    @app.exception_handler(ClientDisconnect)
    async def leave(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_GONE)  # for the metrics; nobody reads it

    @app.exception_handler(Exception)
    async def report(_: Request, error: Exception) -> Response:
        return error_response(500, f"{type(error).__name__}: the server has logged it", kind="server_error")


class _Gate:
    """Checks the key and counts answers. A `BaseHTTPMiddleware` would hide from streams that their client has disconnected."""

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
            message = "the API key is absent or wrong: send it as a bearer token"
            app = error_response(401, message, kind="authentication_error", headers={"WWW-Authenticate": "Bearer"})
        await app(scope, receive, counted)


class _Service:
    def __init__(self, worker: Worker, config: ServerConfig) -> None:
        engine = worker.engine
        self.worker, self.config, self.metrics = worker, config, Metrics(worker)
        max_samples = worker.max_waiting + engine.config.max_batch
        self.pool = Pool(max_jobs=max_samples)
        self.preparation = Preparation(engine, model_name=config.model_name, defaults=config.defaults, max_samples=max_samples)
        self.max_body_bytes = config.max_body_bytes or max(_BODY_BYTES_PER_TOKEN * engine.max_length, _MIN_BODY_BYTES)
        self.schema = schema_of(engine, max_samples=max_samples, needs_key=config.api_key is not None)
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

    async def answer(self, request: Request, kind: type[GenerationRequest]) -> Response:
        raw = await read_body(request, max_bytes=self.max_body_bytes)
        prepared = await self.pool.admit(self.preparation.prepare, raw, kind)
        body = prepared.body
        form = Answer(
            tokenizer=self.preparation.tokenizer,
            model=self.config.model_name,
            is_chat=isinstance(body, ChatRequest),
            with_logprobs=prepared.params.logprobs is not None,
        )
        job = Job(self.worker, self.metrics, prepared, form)
        await job.submit()
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            return Events(job, with_usage=with_usage)
        echo = isinstance(body, CompletionRequest) and body.echo
        return await job.whole(request, self.pool, echo=self.worker.engine.token_decoder if echo else None)


def _route_of(scope: Scope) -> str:
    """The route's pattern: unknown addresses must not each become a metric of their own."""
    return getattr(scope.get("route"), "path", "other")
