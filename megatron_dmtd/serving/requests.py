"""What clients may ask for: the fields of OpenAI's completions and chat completions that this engine has, and a few of its own.

Every other field is refused by name, unless its value asks for nothing. Fields that are about accounts are accepted and not used.
Types are those of JSON: a number in quotes is not a number. Ranges are in the schema and checked by the engine, so that HTTP and
Python refuse the same values. No list is validated beyond its first fault: a body may contain a million of them.
"""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from megatron_dmtd.inference import SamplingParams
from megatron_dmtd.serving.cache_fields import Drops, MessageNumbers, Programs
from megatron_dmtd.serving.faults import BAD_OPERATIONS, RequestError
from megatron_dmtd.serving.fields import (
    MAX_TOP_LOGPROBS,
    WHOLE,
    Fields,
    LogitBias,
    Prompt,
    StopIds,
    StopString,
    StopStrings,
    refuse_unless_silent,
    within,
)
from megatron_dmtd.serving.message_cache import MessageOperations
from megatron_dmtd.serving.messages import CacheOfMessages, Function, Message, TextPart, ToolCall

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
#: of OpenAI's completions, where a request names no length
_DEFAULT_MAX_TOKENS = 16
#: Work per token grows with it.
MAX_LOOPS = 64
#: Templates may take time that grows with the square of this.
MAX_MESSAGES = 4096
#: Fields of cache operations.
_OPERATIONS = {"cache", "drop_message", "reposition"}
#: Faults named in one message.
_MAX_FAULTS = 5


class StreamOptions(Fields):
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


class GenerationRequest(Fields):
    """What both kinds of request have. A field whose default is None has the server's default."""

    model: str | None = None
    temperature: Annotated[float | None, within(minimum=0, maximum=1e9)] = None
    top_p: Annotated[float | None, within(exclusiveMinimum=0, maximum=1)] = None
    n: Annotated[int, within(minimum=1), WHOLE] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    stop: StopString | StopStrings | None = None
    presence_penalty: Annotated[float, within(minimum=-1e9, maximum=1e9)] = 0.0
    frequency_penalty: Annotated[float, within(minimum=-1e9, maximum=1e9)] = 0.0
    logit_bias: LogitBias | None = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63), WHOLE] = None
    """None: another one each time."""

    # This server's own:
    top_k: Annotated[int | None, within(minimum=0), WHOLE] = None
    min_p: Annotated[float | None, within(minimum=0, maximum=1)] = None
    repetition_penalty: Annotated[float | None, within(minimum=1e-9, maximum=1e9)] = None
    stop_token_ids: StopIds = Field(default_factory=list)
    ignore_eos: bool = False
    n_recurrent_loops: Annotated[int | None, within(minimum=1), Field(le=MAX_LOOPS), WHOLE] = None
    """How often looped layers run, for models that have some; None: as the server was started."""

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
        """See `Fields`."""
        if name not in cls.model_fields and name in NOT_HERE:
            refuse_unless_silent(name, value, NOT_HERE[name], param=name)
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
        return {"num_loops": "n_recurrent_loops"}.get(parameter, parameter)

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
            num_loops=self.n_recurrent_loops,
        )


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`."""

    prompt: Prompt
    max_tokens: Annotated[int, within(minimum=0), WHOLE] = _DEFAULT_MAX_TOKENS
    """0: only the prompt, for `echo`."""
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE] = None
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
        return {"max_new_tokens": "max_tokens", "prompt_logprobs": "logprobs"}.get(parameter) or super().name_of(parameter)

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
    def _is_cache_of_a_list(self) -> bool:
        """Whether `cache` has the form for several prompts, for a list of one: no operation is a list, or null."""
        is_list = isinstance(self.prompt, list) and self.cache is not None and len(self.cache) == 1
        return is_list and self.cache is not None and (self.cache[0] is None or isinstance(self.cache[0], list))

    @property
    def programs(self) -> list[Any]:
        """The cache operations of each prompt; None for an ordinary one."""
        num_prompts = len(self.prompts)
        if self.cache is None or (num_prompts == 1 and not self._is_cache_of_a_list):
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


class ChatRequest(GenerationRequest):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int | None, within(minimum=1), WHOLE] = None
    max_completion_tokens: Annotated[int | None, within(minimum=1), WHOLE] = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE] = 0
    """Only with `logprobs`."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
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
        own = {"max_new_tokens": length, "logprobs": "top_logprobs", "prompt": "messages"}
        return own.get(parameter) or super().name_of(parameter)

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
    field = next(iter(faults)) or None
    return RequestError(
        found="; ".join(f"{place or 'the body'}: {fault}" for place, fault in islice(faults.items(), _MAX_FAULTS)),
        required="a JSON object with fields of this route",
        remedy="see /docs for all of them",
        param=field,
        code=BAD_OPERATIONS if field is not None and field.split(".")[0] in _OPERATIONS else None,
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
