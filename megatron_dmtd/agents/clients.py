"""Who answers the requests of a replay: a server over HTTP, or an engine in this process.

Both take the body of a chat request and give the same figures. The engine reads the body with the server's own code, and knows
besides which tokens are active at the end; over HTTP that is not said.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Protocol

from megatron_dmtd.agents.policies import Count, text_of
from megatron_dmtd.errors import CapabilityError, DataError, shown
from megatron_dmtd.inference.cache_ops.usage import Usage

if TYPE_CHECKING:
    from megatron_dmtd.inference import Engine

#: statuses of a server that is busy, and how often and how long it is waited for
_BUSY, _TRIES, _PAUSE_S = (429, 503), 6, 1.0
_NO_USAGE = (
    "usage with prompt_tokens_details.cached_tokens in the last event of a stream, as OpenAI's API has it with "
    "stream_options.include_usage"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What is measured of one request."""

    usage: Usage
    output_tokens: int
    first_token_s: float
    """From sending the request to its first token."""
    active_tokens: int | None = None
    """Prompt tokens that the first new token sees; None if the client cannot know."""


class Client(Protocol):
    """Answers requests, one at a time."""

    def answer(self, body: Mapping[str, Any]) -> Answer:
        """Serve the body of a chat request. Raises `DataError` for a refusal, `CapabilityError` if nobody answers."""


@dataclass(kw_only=True)
class HTTPClient:
    """A server with OpenAI's API."""

    base_url: str
    """Such as http://localhost:8000/v1."""
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = 600.0
    pause_s: float = field(default=_PAUSE_S, repr=False)
    """Before the first new try; each later pause is twice as long."""

    def answer(self, body: Mapping[str, Any]) -> Answer:
        """See `Client`."""
        fields = {**body, "stream": True, "stream_options": {"include_usage": True}}
        if self.model is not None:
            fields["model"] = self.model
        for attempt in range(_TRIES):
            try:
                return self._streamed(fields)
            except urllib.error.HTTPError as error:
                if error.code not in _BUSY or attempt + 1 == _TRIES:
                    raise self._refusal(error) from error
                time.sleep(self.pause_s * 2**attempt)
            except (OSError, HTTPException) as error:
                reason = getattr(error, "reason", None) or error
                raise CapabilityError(
                    found=f"no answer from {self.base_url}: {reason}",
                    required="a running server with OpenAI's API",
                    remedy="start one (python tools/serve.py MODEL), or correct --base-url, which ends in /v1",
                ) from error
        raise AssertionError("the loop returns or raises")

    def _request(self, path: str, fields: Mapping[str, Any] | None = None) -> urllib.request.Request:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if fields is None else json.dumps(fields).encode()
        return urllib.request.Request(f"{self.base_url.rstrip('/')}/{path}", data, headers)

    def _streamed(self, fields: Mapping[str, Any]) -> Answer:
        start, first_s, usage = time.perf_counter(), None, None
        with urllib.request.urlopen(self._request("chat/completions", fields), timeout=self.timeout_s) as response:
            for event in _events(response):
                if "error" in event:
                    raise DataError(found=f"the server says: {_message(event)}", required="an answer", remedy="see its log")
                if first_s is None and any(map(_has_token, event.get("choices", ()))):
                    first_s = time.perf_counter() - start
                usage = event.get("usage") or usage
        if first_s is None:
            first_s = time.perf_counter() - start
        prompt, output = _usage(usage)
        return Answer(usage=prompt, output_tokens=output, first_token_s=first_s)

    def _refusal(self, error: urllib.error.HTTPError) -> DataError:
        try:
            text = _message(json.loads(error.read()))
        except (ValueError, OSError):
            text = error.reason
        found = f"status {error.code} from {self.base_url}: {text}"
        remedy = "change the policy or the trajectory as the server says, or the server's limits"
        return DataError(found=found, required="a request that the server takes", remedy=remedy)


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", error)) if isinstance(error, dict) else shown(body)


def _events(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The objects of server-sent events."""
    for line in lines:
        if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
            event = json.loads(data)
            if isinstance(event, dict):
                yield event


def _has_token(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    texts = ("content", "reasoning_content", "reasoning", "tool_calls")
    return bool(choice.get("finish_reason") or any(delta.get(name) for name in texts))


def _usage(usage: Any) -> tuple[Usage, int]:
    """Of a prompt and its output, from OpenAI's fields; servers without cache operations compute what is not cached."""
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    if not isinstance(details, dict) or not isinstance(details.get("cached_tokens"), int):
        remedy = "turn it on in the server, if it has it: without it nothing can be compared"
        raise CapabilityError(found=f"usage={shown(usage)}", required=_NO_USAGE, remedy=remedy)
    prompt, cached = usage["prompt_tokens"], details["cached_tokens"]
    moved, skipped = details.get("repos_tokens", 0), details.get("drop_skipped_tokens", 0)
    one = Usage(
        prompt_tokens=prompt,
        cached_tokens=cached,
        repos_tokens=moved,
        drop_skipped_tokens=skipped,
        prefill_tokens=usage.get("prefill_tokens", prompt - cached - moved - skipped),
    )
    return one, usage.get("completion_tokens", 0)


def counted_by(tokenizer: Any, *, per_message: int = 4) -> Count:
    """A count by a tokenizer: tokens of content and calls, and some for header and end; near what a template writes."""

    def count(message: Mapping[str, Any]) -> int:
        text = text_of(message.get("content")) + "".join(json.dumps(call) for call in message.get("tool_calls", ()))
        return per_message + len(tokenizer.encode(text, add_special_tokens=False))

    return count


class EngineClient:
    """An engine in this process, with the server's reader of requests before it."""

    def __init__(self, engine: Engine) -> None:
        from megatron_dmtd.serving.preparation import Preparation

        self.engine = engine
        self._preparation = Preparation(engine, model_name="model", defaults={"temperature": 0.0}, max_samples=1)

    def answer(self, body: Mapping[str, Any]) -> Answer:
        """See `Client`."""
        from megatron_dmtd.serving.requests import ChatRequest

        raw = json.dumps(body).encode()
        start, first_s, completion = time.perf_counter(), None, None
        prepared = self._preparation.prepare(raw, ChatRequest)
        (prompt,) = prepared.prompts
        program = None if prompt.program is None else prompt.program.operations
        events = self.engine.stream(prompt.ids, max_new_tokens=prepared.max_new_tokens, params=prepared.params, cache=program)
        for event in events:
            first_s = time.perf_counter() - start if first_s is None else first_s
            completion = event.completion or completion
        assert first_s is not None and completion is not None and completion.usage is not None
        active = len(prompt.ids) if program is None else len(self.engine.cache_state(prompt.ids, cache=program).active)
        return Answer(
            usage=completion.usage, output_tokens=len(completion.token_ids), first_token_s=first_s, active_tokens=active
        )
