"""What clients may ask for: the fields of OpenAI's completions and chat completions that this engine has, and a few of its own.

Every other field is refused by name, unless its value asks for nothing. Fields that are about accounts are taken and not used.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megatron_dmtd.errors import ConfigError
from megatron_dmtd.inference import SamplingParams

#: what OpenAI's clients send for their accounts
_FOR_ACCOUNTS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
#: what this server has not, by the values that ask for nothing, beside null
_NOT_HERE: dict[str, tuple[Any, ...]] = {
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

Ids = Annotated[list[int], Field(min_length=1)]


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    """Also send the numbers of tokens, last."""


class GenerationRequest(BaseModel):
    """What both kinds of request have. None, where it is a field's default, takes the server's."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    """None: another one each time."""

    # This server's own:
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        kept = {}
        for name, value in fields.items():
            if value is None:
                continue  # clients send it for what they leave out
            if name in cls.model_fields or name not in _FOR_ACCOUNTS | _NOT_HERE.keys():
                kept[name] = value
            elif name in _NOT_HERE and value not in _NOT_HERE[name]:
                raise ConfigError(
                    found=f"{name} = {value!r}",
                    required="a request without it: this server does not have it",
                    remedy=f"drop {name}",
                )
        return kept

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens whose log probabilities are asked for beside the chosen one's; None: none at all."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same of tokens of the prompt."""
        return None

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

    prompt: str | Ids | Annotated[list[str], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]
    max_tokens: int = _DEFAULT_MAX_TOKENS
    """0: only the prompt, for `echo`."""
    logprobs: int | None = None
    echo: bool = False
    """Give the prompt back before the output, with log probabilities of its tokens if those are asked for; not streamed."""

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

    @model_validator(mode="after")
    def _echo_is_not_streamed(self) -> CompletionRequest:
        if self.echo and self.stream:
            raise ConfigError(found="echo with stream", required="one of the two", remedy="drop stream")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or more texts, or lists of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a chat. Fields that a model's template may know, such as `name`, travel along."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[TextPart]

    def for_template(self) -> dict[str, Any]:
        """What chat templates expect."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return self.model_dump(exclude={"content"}) | {"content": text}


class ChatRequest(GenerationRequest):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    chat_template_kwargs: dict[str, Any] = {}
    """This server's own: more values for the model's chat template."""

    @property
    def num_logprobs(self) -> int | None:
        """See `GenerationRequest`."""
        return self.top_logprobs if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """Tokens of an output at most; None: as many as there is room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
