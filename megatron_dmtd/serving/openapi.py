"""The published description of the API, `/openapi.json`: what each route accepts, and every answer that it gives.

Written by hand where the framework would guess: bodies are read by `bodies` and `requests`, and refusals have OpenAI's form.
Ranges that depend on the model (ids, outputs of one request) are those of the served model.
"""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

import megatron_dmtd
from megatron_dmtd.inference import Engine
from megatron_dmtd.inference.loops import most_request_loops
from megatron_dmtd.inference.text import encode
from megatron_dmtd.serving.requests import FOR_ACCOUNTS, MAX_LOOPS, NOT_HERE, ChatRequest, CompletionRequest

Schema = dict[str, Any]

_INTEGER: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_STRING: Schema = {"type": "string"}
#: what each refusal means
_REFUSALS = {
    400: "The request cannot be served as it is; `param` names the field at fault",
    401: "The API key is absent or wrong",
    404: "There is no such model",
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "The body is not sent as JSON",
    429: "As many requests wait as may; try again later",
    500: "A fault of the server, which it has logged",
    503: "Nothing is served any more: a fault of the engine, or the server is shutting down",
}


def schema_of(engine: Engine, *, max_samples: int, needs_key: bool) -> Schema:
    """The description of a server over `engine`. `max_samples`: the outputs of one request at most."""
    schemas = {**_request_schemas(engine, max_samples), **_answer_schemas()}
    secured: list[Schema] = [{"key": []}] if needs_key else []
    refused_key = [401] if needs_key else []
    generation = [400, *refused_key, 404, 408, 413, 415, 429, 500, 503]
    paths = {
        "/v1/completions": {
            "post": _generation("Completes texts or token ids", "CompletionRequest", "Completion", generation, secured)
        },
        "/v1/chat/completions": {
            "post": _generation("Goes on with a chat", "ChatRequest", "ChatCompletion", generation, secured)
        },
        "/v1/models": {"get": _plain("The one model, as a list", _json("Models"), refused_key, secured)},
        "/v1/models/{name}": {
            "get": _plain("The one model", _json("Model"), [*refused_key, 404], secured)
            | {"parameters": [{"name": "name", "in": "path", "required": True, "schema": _STRING | {"minLength": 1}}]}
        },
        "/health": {"get": _plain("Whether requests are served", {"description": "They are; no body"}, [503], [])},
        "/metrics": {"get": _plain("Counts and times, for Prometheus", _text("text/plain", "Prometheus's text format"), [], [])},
    }
    components: Schema = {"schemas": schemas}
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    info = {"title": "megatron_dmtd", "version": megatron_dmtd.__version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _object(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    properties = required | (optional or {})
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _array(items: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": items, **bounds}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(name: str, description: str = "The answer") -> Schema:
    return {"description": description, "content": {"application/json": {"schema": _ref(name)}}}


def _text(media_type: str, description: str) -> Schema:
    return {"description": description, "content": {media_type: {"schema": _STRING}}}


def _refused(statuses: list[int]) -> Schema:
    found: Schema = {}
    for status in statuses:
        answer = _json("Error", _REFUSALS[status])
        if status in (429, 503):
            answer["headers"] = {"Retry-After": {"description": "Seconds", "schema": _STRING}}
        found[str(status)] = answer
    return found


def _plain(summary: str, answer: Schema, statuses: list[int], secured: list[Schema]) -> Schema:
    return {"summary": summary, "security": secured, "responses": {"200": answer, **_refused(statuses)}}


def _generation(summary: str, request: str, answer: str, statuses: list[int], secured: list[Schema]) -> Schema:
    whole = _json(answer, "The answer, or with `stream` its chunks as server-sent events, `[DONE]` last")
    event = {"type": "object", "properties": {"data": _STRING}, "required": ["data"]}
    whole["content"]["text/event-stream"] = {"schema": event | {"description": "Each event: a chunk as JSON, or `[DONE]`"}}
    return {
        "summary": summary,
        "security": secured,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
        "responses": {"200": whole, **_refused(statuses)},
    }


# Requests.


def _request_schemas(engine: Engine, max_samples: int) -> Schema:
    """Schemas of both kinds of request, with the parts that they name."""
    kinds = (ChatRequest, CompletionRequest)
    _, found = models_json_schema([(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}")
    parts = found["$defs"]
    for name, schema in parts.items():
        _let_null(schema)
        if name in ("ChatRequest", "CompletionRequest"):
            _add_unused(schema)
            schema["properties"]["n"]["anyOf"][0]["maximum"] = max_samples
            schema["properties"]["max_tokens"]["anyOf"][0]["maximum"] = engine.max_length - 1
            most_loops = min(MAX_LOOPS, most_request_loops(engine.model.schedule.decoder) or MAX_LOOPS)
            schema["properties"]["n_recurrent_loops"]["anyOf"][0]["maximum"] = most_loops
    _limit_ids(parts, engine.model.schedule.decoder.vocab_size)
    _describe_prompts(parts["CompletionRequest"]["properties"]["prompt"], engine, max_samples)
    _describe_messages(parts["Message"])
    _describe_combinations(parts)
    return parts


def _let_null(schema: Schema) -> None:
    """Clients send null for what they leave out."""
    for name, own in schema.get("properties", {}).items():
        if name not in schema.get("required", ()) and {"type": "null"} not in own.get("anyOf", ()):
            kept = {key: own.pop(key) for key in ("default", "description", "title") if key in own}
            schema["properties"][name] = _or_null(own) | kept


def _add_unused(schema: Schema) -> None:
    """What is accepted without being used, and what may only ask for nothing."""
    for name in sorted(FOR_ACCOUNTS):
        schema["properties"][name] = {"description": "Accepted, and not used"}
    for name, silent in NOT_HERE.items():
        if name not in schema["properties"]:
            schema["properties"][name] = {"description": "Not here: only what asks for nothing", "enum": [*silent, None]}


def _limit_ids(schema: Any, vocab_size: int) -> None:
    """Token ids are the only integers in lists."""
    if isinstance(schema, list):
        for part in schema:
            _limit_ids(part, vocab_size)
    elif isinstance(schema, dict):
        items = schema.get("items")
        if isinstance(items, dict) and items.get("type") == "integer":
            schema["items"] = items | {"maximum": vocab_size - 1}
        for part in schema.values():
            _limit_ids(part, vocab_size)


def _describe_prompts(schema: Schema, engine: Engine, max_samples: int) -> None:
    """An empty text is a prompt where the tokenizer puts a token before every text."""
    text, texts, ids, lists = schema["anyOf"]
    text["minLength"] = texts["items"]["minLength"] = 0 if encode(engine.tokenizer, "") else 1
    texts["maxItems"] = lists["maxItems"] = max_samples
    ids["maxItems"] = lists["items"]["maxItems"] = engine.max_length


def _describe_messages(schema: Schema) -> None:
    has_content = {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}}
    calls = _array({}, minItems=1)
    has_calls = {"required": ["tool_calls"], "properties": {"role": {"const": "assistant"}, "tool_calls": calls}}
    calls_nothing = {"properties": {"tool_calls": {"anyOf": [{"type": "null"}, _array({}, maxItems=0)]}}}
    schema["anyOf"] = [{"allOf": [has_content, calls_nothing]}, has_calls]
    for name in ("refusal", "audio", "function_call"):
        schema["properties"][name] = {"type": "null"}
    schema["properties"]["annotations"] = {"enum": [[], None]}


def _describe_combinations(parts: Schema) -> None:
    """What fields ask of each other."""
    streams = {"properties": {"stream": {"const": True}}, "required": ["stream"]}
    no_usage = {"properties": {"stream_options": {"properties": {"include_usage": {"enum": [False, None]}}}}}
    for kind in ("ChatRequest", "CompletionRequest"):
        parts[kind]["allOf"] = [{"anyOf": [streams, no_usage]}]
    not_echoed = {"properties": {"echo": {"enum": [False, None]}}}
    not_streamed = {"properties": {"stream": {"enum": [False, None]}}}
    has_output = {"properties": {"max_tokens": {"anyOf": [{"minimum": 1}, {"type": "null"}]}}}
    echoes = {"properties": {"echo": {"const": True}}, "required": ["echo"]}
    parts["CompletionRequest"]["allOf"] += [{"anyOf": [not_echoed, not_streamed]}, {"anyOf": [echoes, has_output]}]
    logs = {"properties": {"logprobs": {"const": True}}, "required": ["logprobs"]}
    no_top = {"properties": {"top_logprobs": {"enum": [0, None]}}}
    one_length = {"anyOf": [{"properties": {name: {"type": "null"}}} for name in ("max_tokens", "max_completion_tokens")]}
    parts["ChatRequest"]["allOf"] += [{"anyOf": [logs, no_top]}, one_length]


# Answers.


def _answer_schemas() -> Schema:
    error = _object({"message": _STRING, "type": _STRING, "param": _or_null(_STRING), "code": _or_null(_STRING)})
    model = _object(
        {"id": _STRING, "object": {"const": "model"}, "created": _INTEGER, "owned_by": _STRING, "max_model_len": _INTEGER}
    )
    reused = dict.fromkeys(("cached_tokens", "repos_tokens", "drop_skipped_tokens"), _INTEGER)
    counts = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens", *reused, "prefill_tokens"), _INTEGER)
    usage = _object(counts | {"prompt_tokens_details": _object(reused)})
    token = {"token": _STRING, "logprob": _NUMBER, "bytes": _or_null(_array(_INTEGER))}
    chat_logprobs = _object(
        {"content": _array(_object({**token, "top_logprobs": _array(_object(token))})), "refusal": {"type": "null"}}
    )
    text_logprobs = _object(
        {
            "tokens": _array(_STRING),
            "token_logprobs": _array(_or_null(_NUMBER)),
            "top_logprobs": _array(_or_null({"type": "object", "additionalProperties": _NUMBER})),
            "text_offset": _array(_INTEGER),
        }
    )
    message = _object({"role": {"const": "assistant"}, "content": _STRING})
    return {
        "Error": _object({"error": error}),
        "Model": model,
        "Models": _object({"object": {"const": "list"}, "data": _array(_ref("Model"))}),
        "Usage": usage,
        "Completion": _answer("text_completion", {"text": _STRING, "logprobs": _or_null(text_logprobs)}),
        "ChatCompletion": _answer("chat.completion", {"message": message, "logprobs": _or_null(chat_logprobs)}),
    }


def _answer(kind: str, own: dict[str, Schema]) -> Schema:
    choice = _object({"index": _INTEGER, "finish_reason": {"enum": ["stop", "length"]}, **own})
    return _object(
        {
            "id": _STRING,
            "object": {"const": kind},
            "created": _INTEGER,
            "model": _STRING,
            "choices": _array(choice, minItems=1),
            "usage": _ref("Usage"),
        }
    )
