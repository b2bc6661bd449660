"""What clients may ask for: the fields of OpenAI's completions and chat completions that this engine has, and a few of its own.

Every other field is refused by name, unless its value asks for nothing. Fields that are about accounts are accepted and not used.
Types are those of JSON: a number in quotes is not a number. Ranges are in the schema and checked by the engine, so that HTTP and
Python refuse the same values. No list is validated beyond its first fault: a body may contain a million of them.
"""

from __future__ import annotations

import difflib
import re
import secrets
from collections.abc import Iterable, Mapping
from itertools import islice, takewhile
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from megatron_dmtd.errors import shown
from megatron_dmtd.inference import SamplingParams
from megatron_dmtd.serving.cache_fields import Drops, MessageNumbers, Programs
from megatron_dmtd.serving.faults import BAD_OPERATIONS, RequestError
from megatron_dmtd.serving.message_cache import MessageOperations

#: what OpenAI's clients send for their accounts
FOR_ACCOUNTS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
#: what this server does not have, with the values, besides null, that ask for nothing
NOT_HERE: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
}
#: the same in a message of a chat, and in a part of one
_NOT_IN_MESSAGES: dict[str, tuple[Any, ...]] = {"refusal": (), "annotations": ([],), "audio": (), "function_call": ()}
#: a hint for caching; prefixes are cached anyway
_HINTS = {"cache_control"}
#: of OpenAI's completions, where a request names no length
_DEFAULT_MAX_TOKENS = 16
#: Work per token grows with these.
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS, MAX_STOP_TOKEN_IDS, MAX_BIASED_TOKENS, MAX_TOP_LOGPROBS = 64, 1000, 1024, 1024, 20
#: Templates may take time that grows with the square of this.
MAX_MESSAGES = 4096
#: Faults named in one message.
_MAX_FAULTS = 5
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,8}")
_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def _within(**bounds: float) -> Any:
    """A range for the schema; the engine checks it."""
    return Field(json_schema_extra=dict(bounds))


def _prompt(value: Any) -> str | list[str] | list[list[int]]:
    """A text, texts, or lists of ids."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        if ids := _ids(value):
            return [ids]
        lists = list(takewhile(bool, map(_ids, value)))
        if len(lists) == len(value):
            return lists
    raise ValueError("Input should be a text, texts, token ids, or lists of token ids; no list empty")


def _ids(items: Any) -> list[int]:
    """A list of ids; empty if it is none."""
    if not isinstance(items, list):
        return []
    if not all(type(item) is int for item in items):
        items = [_whole(item) for item in items]
    return items if all(type(item) is int for item in items) else []


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 5.0 is the integer 5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"Input should be an object of at most {MAX_BIASED_TOKENS} numbers by token id")
    for name, bias in value.items():
        if not _TOKEN_ID.fullmatch(name) or isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError(f"Input should have a number for each token id, not {shown(bias)} for {shown(name)}")
    return {int(name): float(bias) for name, bias in value.items()}


_Prompt = Annotated[
    str | list[str] | list[list[int]],
    PlainValidator(_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _IDS_SCHEMA,
                {"type": "array", "items": _IDS_SCHEMA, "minItems": 1},
            ]
        }
    ),
]
_LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": f"^({_TOKEN_ID.pattern})$"},
            "additionalProperties": {"type": "number", "minimum": -1e9, "maximum": 1e9},
            "maxProperties": MAX_BIASED_TOKENS,
        }
    ),
]
_WHOLE = BeforeValidator(_whole)
_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_StopStrings = Annotated[list[_StopString], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)]
_StopIds = Annotated[list[Annotated[int, _within(minimum=0), _WHOLE]], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS)]


class _Fields(BaseModel):
    """An object in a request. Clients send null for fields that they leave out."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _what_asks_for_something(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        kept = {name: value for name, value in fields.items() if not cls.asks_for_nothing(name, value)}
        if cls.model_config["extra"] == "forbid":
            # Here, and not by pydantic, which would describe each of a million.
            for name in kept:
                if name not in cls.model_fields:
                    raise ValueError(f"an unknown field {name[:100]}")
        return kept

    @classmethod
    def asks_for_nothing(cls, name: str, value: Any) -> bool:
        """Whether a field may be left out. Raises `RequestError` for what this server does not have."""
        return value is None


class StreamOptions(_Fields):
    """`stream_options`."""

    include_usage: bool = False
    """Also send the numbers of tokens, last."""
    include_obfuscation: Annotated[bool, Field(json_schema_extra={"const": False})] = False
    """Padding against the guessing of lengths, which this server does not have."""

    @field_validator("include_obfuscation")
    @classmethod
    def _is_not_asked_for(cls, value: bool) -> bool:
        if value:
            raise ValueError("Input should be false: this server does not have it")
        return value


class GenerationRequest(_Fields):
    """What both kinds of request have. A field whose default is None has the server's default."""

    model: str | None = None
    temperature: Annotated[float | None, _within(minimum=0, maximum=1e9)] = None
    top_p: Annotated[float | None, _within(exclusiveMinimum=0, maximum=1)] = None
    n: Annotated[int, _within(minimum=1), _WHOLE] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    stop: _StopString | _StopStrings | None = None
    presence_penalty: Annotated[float, _within(minimum=-1e9, maximum=1e9)] = 0.0
    frequency_penalty: Annotated[float, _within(minimum=-1e9, maximum=1e9)] = 0.0
    logit_bias: _LogitBias | None = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63), _WHOLE] = None
    """None: another one each time."""

    # This server's own:
    top_k: Annotated[int | None, _within(minimum=0), _WHOLE] = None
    min_p: Annotated[float | None, _within(minimum=0, maximum=1)] = None
    repetition_penalty: Annotated[float | None, _within(minimum=1e-9, maximum=1e9)] = None
    stop_token_ids: _StopIds = []
    ignore_eos: bool = False

    @classmethod
    def taken_from(cls, fields: dict[str, Any]) -> Any:
        """The request in a JSON object. Raises `RequestError` that names what is wrong."""
        try:
            cls._check_names(fields)
            return cls.model_validate(fields)
        except ValidationError as error:
            raise _described(error) from None

    @classmethod
    def _check_names(cls, fields: dict[str, Any]) -> None:
        known = cls.model_fields.keys() | FOR_ACCOUNTS | NOT_HERE.keys()
        unknown = list(islice((name for name, value in fields.items() if value is not None and name not in known), _MAX_FAULTS))
        if unknown:
            raise RequestError(
                found="; ".join(_unknown(name, cls.model_fields) for name in unknown),
                required="a JSON object with fields of this route",
                remedy="see /docs for all of them",
                param=unknown[0][:100],
            )

    @classmethod
    def asks_for_nothing(cls, name: str, value: Any) -> bool:
        """See `_Fields`."""
        if name not in cls.model_fields and name in NOT_HERE:
            _refuse_unless_silent(name, value, NOT_HERE[name], param=name)
        return value is None or name not in cls.model_fields

    @model_validator(mode="after")
    def _options_of_streams(self) -> GenerationRequest:
        if self.stream_options is not None and self.stream_options.include_usage and not self.stream:
            raise _contradiction("stream_options without stream", param="stream_options", remedy="set stream, or drop them")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens whose log probabilities are asked for besides the chosen one's; None: none at all."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same of tokens of the prompt."""
        return None

    @property
    def most_tokens(self) -> int | None:
        """Tokens of an output at most; None: as many as there is room for."""
        raise NotImplementedError

    def name_of(self, parameter: str) -> str:
        """What this route calls a parameter of the engine."""
        raise NotImplementedError

    def sampling_params(self, defaults: Mapping[str, float]) -> SamplingParams:
        """How the engine is to choose. `defaults`: of temperature, top_p, top_k, min_p and repetition_penalty."""
        chosen = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
        chosen = {name: defaults.get(name) if value is None else value for name, value in chosen.items()}
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return SamplingParams(
            **{name: value for name, value in chosen.items() if value is not None},
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias or {},
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            n=self.n,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            stop=tuple(stop or ()),
            detokenize=True,
        )


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`."""

    prompt: _Prompt
    max_tokens: Annotated[int, _within(minimum=0), _WHOLE] = _DEFAULT_MAX_TOKENS
    """0: only the prompt, for `echo`."""
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS), _WHOLE] = None
    cache: Programs | None = None
    """Cache operations of the prompt, or for several prompts a list of those of each."""
    echo: bool = False
    """Return the prompt before the output, with log probabilities of its tokens if those are asked for; not streamed."""

    @property
    def num_logprobs(self) -> int | None:
        """See `GenerationRequest`."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """See `GenerationRequest`."""
        if not self.echo:
            return None
        return self.logprobs if self.max_tokens else self.logprobs or 0

    @property
    def most_tokens(self) -> int | None:
        """See `GenerationRequest`."""
        return self.max_tokens

    def name_of(self, parameter: str) -> str:
        """See `GenerationRequest`."""
        return {"max_new_tokens": "max_tokens", "prompt_logprobs": "logprobs"}.get(parameter, parameter)

    @model_validator(mode="after")
    def _echo_is_not_streamed(self) -> CompletionRequest:
        if self.echo and self.stream:
            raise _contradiction("echo with stream", param="echo", remedy="drop stream")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or more texts, or lists of token ids."""
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt

    @property
    def programs(self) -> list[Any]:
        """The cache operations of each prompt; None for an ordinary one."""
        num_prompts = len(self.prompts)
        if self.cache is None or num_prompts == 1:
            return [self.cache] * num_prompts
        if len(self.cache) != num_prompts or not all(one is None or isinstance(one, list) for one in self.cache):
            raise RequestError(
                found=f"a cache of {len(self.cache)} items for {num_prompts} prompts",
                required="a list of operations, or null, for each prompt",
                remedy="give as many lists as prompts",
                param="cache",
                code=BAD_OPERATIONS,
            )
        return self.cache


class TextPart(_Fields):
    """A part of a message."""

    type: Literal["text"]
    text: str

    @classmethod
    def asks_for_nothing(cls, name: str, value: Any) -> bool:
        """See `_Fields`."""
        if name == "type" and value != "text":
            raise ValueError(f"a part of type {shown(value)}: only text is taken here")
        return value is None or name in _HINTS


class Function(_Fields):
    """What a tool call calls."""

    name: str
    arguments: str | dict[str, Any]
    """OpenAI's API has an object written as JSON in a text."""


class ToolCall(_Fields):
    """A call that an assistant has made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class Message(_Fields):
    """One turn of a chat. Fields that a model's template may know, such as `name`, are passed on."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, min_length=1)] | None = None
    """Only an assistant that calls tools may have none."""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] = []

    @classmethod
    def asks_for_nothing(cls, name: str, value: Any) -> bool:
        """See `_Fields`."""
        if name in _NOT_IN_MESSAGES:
            _refuse_unless_silent(f"a message's {name}", value, _NOT_IN_MESSAGES[name], param="messages")
        return value is None or name in _HINTS or name in _NOT_IN_MESSAGES

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant has tool_calls")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is required, but where an assistant has tool_calls")
        return self

    def as_turn(self) -> dict[str, Any]:
        """The message as a record of a corpus would hold it: without fields that the client left out."""
        turn = self.model_dump(exclude_unset=True)
        for call in turn.get("tool_calls", ()):
            call.setdefault("type", "function")
        return turn


class CacheOfMessages(_Fields):
    """`cache` of a chat."""

    drop: Drops = {}
    drop_message: Drops | None = None
    """Another name for `drop`."""
    reposition: MessageNumbers = []
    """Messages after which the survivors move to positions from 0."""


class ChatRequest(GenerationRequest):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int | None, _within(minimum=1), _WHOLE] = None
    max_completion_tokens: Annotated[int | None, _within(minimum=1), _WHOLE] = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), _WHOLE] = 0
    """Only with `logprobs`."""
    chat_template_kwargs: dict[str, Any] = {}
    """This server's own: more values for the model's chat template."""
    cache: CacheOfMessages | None = None
    """This server's own: cache operations, by message numbers from 0. An empty object has none, and keeps the chat for later."""
    drop_message: Drops | None = None
    """`cache.drop`, next to the messages."""
    reposition: MessageNumbers | None = None
    """`cache.reposition`, next to the messages."""

    @property
    def num_logprobs(self) -> int | None:
        """See `GenerationRequest`."""
        return self.top_logprobs if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """See `GenerationRequest`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def name_of(self, parameter: str) -> str:
        """See `GenerationRequest`."""
        length = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"max_new_tokens": length, "logprobs": "top_logprobs", "prompt": "messages"}.get(parameter, parameter)

    @property
    def operations(self) -> MessageOperations | None:
        """Cache operations; None for an ordinary request."""
        if self.cache is None and self.drop_message is None and self.reposition is None:
            return None
        cache, is_nested = self.cache or CacheOfMessages(), self.cache is not None
        drop = self.drop_message if not is_nested else cache.drop if cache.drop_message is None else cache.drop_message
        name = "drop" if is_nested and cache.drop_message is None else "drop_message"
        return MessageOperations(
            drop=drop or {},
            reposition=(cache.reposition if is_nested else self.reposition) or [],
            drop_name=f"cache.{name}" if is_nested else name,
            reposition_name="cache.reposition" if is_nested else "reposition",
        )

    @model_validator(mode="after")
    def _cache_is_given_once(self) -> ChatRequest:
        if self.cache is not None:
            if self.drop_message is not None or self.reposition is not None:
                found = "cache together with drop_message or reposition"
                raise _contradiction(found, param="cache", remedy="put everything into cache")
            if self.cache.drop and self.cache.drop_message is not None:
                raise _contradiction("cache.drop together with cache.drop_message", param="cache", remedy="give cache.drop alone")
        return self

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise _contradiction("top_logprobs without logprobs", param="top_logprobs", remedy="set logprobs to true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            found = "max_tokens and max_completion_tokens that differ"
            raise _contradiction(found, param="max_tokens", remedy="give max_completion_tokens alone")
        return self


def _contradiction(found: str, *, param: str, remedy: str) -> RequestError:
    return RequestError(found=found, required="fields that agree", remedy=remedy, param=param)


def _refuse_unless_silent(name: str, value: Any, silent: tuple[Any, ...], *, param: str) -> None:
    if value is not None and not any(type(value) is type(other) and value == other for other in silent):
        raise RequestError(
            found=f"{name} = {shown(value)}",
            required="a request without it: this server does not have it",
            remedy=f"drop {name}",
            param=param,
        )


def _unknown(name: str, known: Iterable[str]) -> str:
    closest = difflib.get_close_matches(name[:100], sorted(known), n=1)
    return f"an unknown field {name[:100]}" + (f"; closest: {closest[0]}" if closest else "")


def _described(error: ValidationError) -> RequestError:
    """The first faults of a body, by name."""
    faults: dict[str, str] = {}
    # Of a field that may be of several types there is a fault for each; the one that went deepest is meant.
    details = error.errors(include_url=False, include_context=False, include_input=False)
    for fault in sorted(details, key=lambda fault: (-len(fault["loc"]), fault["type"].endswith("_type"))):
        place = _place(fault["loc"])
        if not any(other == place or other.startswith(f"{place}.") for other in faults):
            faults[place] = fault["msg"].removeprefix("Value error, ")
    return RequestError(
        found="; ".join(f"{place or 'the body'}: {fault}" for place, fault in islice(faults.items(), _MAX_FAULTS)),
        required="a JSON object with fields of this route",
        remedy="see /docs for all of them",
        param=next(iter(faults)) or None,
    )


def _place(parts: tuple[int | str, ...]) -> str:
    """The field at fault. A place of pydantic's also names the types that it has tried."""
    names = {name for kind in _KINDS for name in kind.model_fields}
    return ".".join(str(part) for part in parts if isinstance(part, int) or part in names)


_KINDS: tuple[type[BaseModel], ...] = (
    CompletionRequest,
    ChatRequest,
    CacheOfMessages,
    StreamOptions,
    Message,
    TextPart,
    ToolCall,
    Function,
)
