"""Refusals over HTTP: status, and a body as in OpenAI's API, with the parameter at fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse, Response

from megatron_dmtd.errors import CapabilityError, ConfigError, DMTDError

#: what OpenAI's API calls a request that is too long for the model
TOO_LONG = "context_length_exceeded"
#: cache operations that do not fit to the messages or tokens of their request
BAD_OPERATIONS = "invalid_cache_operations"


class RequestError(ConfigError):
    """A request that cannot be served as it is."""

    status = 400

    def __init__(self, *, found: str, required: str, remedy: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(found=found, required=required, remedy=remedy)
        self.param, self.code = param, code


class UnknownModelError(RequestError):
    """A request for another model than the one that is served."""

    status = 404


class BodyTooLargeError(RequestError):
    """A body beyond the server's limit."""

    status = 413


class BodyTimeoutError(RequestError):
    """A body that takes too long to arrive."""

    status = 408


class MediaTypeError(RequestError):
    """A body that is not sent as JSON."""

    status = 415


class OverloadError(CapabilityError):
    """The queue is full. The request can be tried again later."""


class OutOfServiceError(CapabilityError):
    """Requests are no longer served."""


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of a refusal. No character of it is half of a pair, whatever the request held."""
    clean = message.encode("utf-8", "backslashreplace").decode("utf-8")
    return {"error": {"message": clean, "type": kind, "param": param, "code": code}}


def error_response(
    status: int, message: str, *, kind: str, param: str | None = None, code: str | None = None, headers: Mapping[str, str] = {}
) -> Response:
    """A refusal."""
    retry = {"Retry-After": "1"} if status in (429, 503) else {}
    # What follows on the connection may be the rest of a body that was not read.
    close = {"Connection": "close"} if status in (408, 413) else {}
    body = error_body(message, kind=kind, param=param, code=code)
    return JSONResponse(body, status_code=status, headers={**headers, **retry, **close})


def refusal(error: DMTDError) -> Response:
    """The answer to a request that was refused."""
    if isinstance(error, OverloadError):
        return error_response(429, str(error), kind="overloaded")
    if isinstance(error, OutOfServiceError):
        return error_response(503, str(error), kind="server_error")
    if isinstance(error, RequestError):
        return error_response(error.status, str(error), kind="invalid_request_error", param=error.param, code=error.code)
    return error_response(400, str(error), kind="invalid_request_error")
