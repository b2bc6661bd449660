"""Bodies of requests: read up to a limit, and parsed as JSON objects of valid text. Knows no fields."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, NoReturn

from fastapi import Request

from megatron_dmtd.serving.faults import BodyTimeoutError, BodyTooLargeError, MediaTypeError, RequestError

#: Seconds within which a body must have arrived.
BODY_TIMEOUT_S = 60.0
#: Bytes of a too large body that are read and dropped, for clients that read no answer before they have sent everything.
MAX_DROPPED_BYTES = 64 * 2**20
#: Most lists and objects in one body: each costs as much as a long text, and everything else has to wait while they are made.
MAX_CONTAINERS = 32_768
_REQUIRED = "a JSON object with fields of this route"
_REMEDY = "see /docs for all of them"
#: A string of JSON, whose brackets do not count; one that does not end goes to the end, so that each byte is looked at once.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.|\\\Z)*+(?:"|\Z)', re.DOTALL)
#: An escape that may be half of a character beyond the first 65,536.
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(request: Request, *, max_bytes: int, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """The whole body.

    Raises:
        MediaTypeError: Its content type is not JSON.
        BodyTooLargeError: It is larger than `max_bytes`; nothing beyond that is kept.
        BodyTimeoutError: It did not arrive in time.
    """
    _check_media_type(request.headers.get("content-type", ""))
    body, num_bytes = bytearray(), 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes <= max_bytes:
                    body += chunk
                elif num_bytes > MAX_DROPPED_BYTES:
                    break
    except TimeoutError as error:
        raise BodyTimeoutError(
            found=f"{num_bytes} bytes of a body after {timeout_s:g} s",
            required="the whole body by then",
            remedy="send it faster",
        ) from error
    if num_bytes > max_bytes:
        raise BodyTooLargeError(
            found=f"a body of {'at least ' if num_bytes > MAX_DROPPED_BYTES else ''}{num_bytes} bytes",
            required=f"at most {max_bytes}",
            remedy="send less at once, or start the server with a larger --max-body-mib",
        )
    return bytes(body)


def _check_media_type(value: str) -> None:
    media_type = value.split(";")[0].strip().lower()
    if media_type != "application/json" and not (media_type.startswith("application/") and media_type.endswith("+json")):
        raise MediaTypeError(
            found=f"a body of type {media_type[:100] or 'nothing'}",
            required="application/json",
            remedy="send the header Content-Type: application/json",
        )


def parsed(body: bytes) -> dict[str, Any]:
    """The JSON object in a body, all of whose strings are Unicode. Raises `RequestError`."""
    if _num_brackets(body) > MAX_CONTAINERS and (found := _num_brackets(_STRING.sub(b"", body))) > MAX_CONTAINERS:
        required = f"at most {MAX_CONTAINERS}"
        raise RequestError(found=f"a body of {found} lists and objects", required=required, remedy="send less at once")
    try:
        fields = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _not_json(f"a byte that is not UTF-8 at {error.start}") from error
    except json.JSONDecodeError as error:
        raise _not_json(error.msg, place=f", at character {error.pos}") from error
    except RecursionError as error:
        raise _not_json("it is nested too deeply") from error
    except ValueError as error:  # a number of thousands of digits
        raise _not_json(str(error)) from error
    if not isinstance(fields, dict):
        raise RequestError(found="a body that is no JSON object", required=_REQUIRED, remedy=_REMEDY)
    if _HALF.search(body):
        _check_characters(fields)
    return fields


def _num_brackets(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _not_json(reason: str, *, place: str = "") -> RequestError:
    return RequestError(found=f"a body that is no JSON{place}: {reason}", required=_REQUIRED, remedy=_REMEDY)


def _check_characters(fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode("utf-8")
        except RecursionError as error:
            raise _not_json("it is nested too deeply") from error
        except UnicodeEncodeError as error:
            raise RequestError(
                found=f"half of a surrogate pair in {name.encode('utf-8', 'backslashreplace').decode()[:100]}",
                required="text in Unicode",
                remedy="send both halves, or the character itself",
                param=name if name.isidentifier() else None,
            ) from error
