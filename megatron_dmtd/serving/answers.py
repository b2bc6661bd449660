"""Answers in the form of OpenAI's API, complete or in chunks. Knows no HTTP."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_dmtd.inference import Event
from megatron_dmtd.inference.cache_ops.usage import Usage as PromptUsage
from megatron_dmtd.inference.detokenizer import Detokenizer, TokenDecoder
from megatron_dmtd.inference.sampler import Choice

#: Longer lists are lists of tokens: many small items.
_MANY = 64


@dataclass(frozen=True, slots=True)
class Token:
    """A token, and where its text begins in the output; tokens that share characters begin at the same place."""

    choice: Choice
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What is new of one sample's output."""

    text: str
    tokens: tuple[Token, ...]
    """Its tokens, and those whose text had been held back; also the ones of a stop string, whose text is not given."""
    finish_reason: str | None


class Sample:
    """One output as it grows."""

    def __init__(self) -> None:
        self._held_back: list[Token] = []
        self.num_tokens = 0
        self.prompt_logprobs: Sequence[Choice] = ()
        """Log probabilities of the prompt's tokens, at the end, if asked for."""
        self.usage: PromptUsage | None = None
        """What became of the prompt's tokens, at the end."""

    def add(self, event: Event) -> Piece | None:
        """The text that one more token makes certain; None if there is none yet."""
        if event.completion is not None:
            self.prompt_logprobs = event.completion.prompt_logprobs
            self.usage = event.completion.usage
        if event.choice is None:
            return Piece(text="", tokens=(), finish_reason="length")
        self.num_tokens += 1
        self._held_back.append(Token(event.choice, event.text_offset))
        if not event.text and event.completion is None:
            return None
        tokens, self._held_back = tuple(self._held_back), []
        return Piece(text=event.text, tokens=tokens, finish_reason=event.completion.finish_reason if event.completion else None)


def _finite(logprob: float | None) -> float | None:
    """JSON has no infinity, for which OpenAI's API has -9999. The first token of a text has no log probability."""
    return None if logprob is None else max(logprob, -9999.0)


def echoed(decoder: TokenDecoder, prompt: str | None, prompt_ids: Sequence[int], choices: Sequence[Choice]) -> Piece:
    """A prompt, to be returned before its output. `prompt`: its text, None for ids. `choices`: those of `Completion`."""
    text, tokens = Detokenizer(decoder), []
    for index, token_id in enumerate(prompt_ids):
        choice = choices[index - 1] if index and choices else Choice(token_id)
        tokens.append(Token(choice, text.num_characters))
        text.add(token_id)
    return Piece(text=text.finish() if prompt is None else prompt, tokens=tuple(tokens), finish_reason=None)


def after(first: Piece, second: Piece) -> Piece:
    """Two pieces as one."""
    moved = tuple(Token(token.choice, token.offset + len(first.text)) for token in second.tokens)
    return Piece(text=first.text + second.text, tokens=first.tokens + moved, finish_reason=second.finish_reason)


def joined(pieces: Iterable[Piece]) -> Piece:
    """A whole output."""
    pieces = list(pieces)
    return Piece(
        text="".join(piece.text for piece in pieces),
        tokens=tuple(token for piece in pieces for token in piece.tokens),
        finish_reason=pieces[-1].finish_reason,
    )


def dumped(value: Any) -> str:
    """JSON, encoded in parts: the encoder holds the interpreter lock all the time, and everything else would have to wait."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{_at_once(name)}:{dumped(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_at_once if len(value) > _MANY else dumped, value)) + "]"
    return _at_once(value)


def _at_once(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


@dataclass(kw_only=True, slots=True)
class Usage:
    """Numbers of tokens. Of the prompt's, each is at most one of the last four (docs/cache_operations.md)."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    repos_tokens: int = 0
    drop_skipped_tokens: int = 0
    prefill_tokens: int = 0

    def fields(self) -> dict[str, Any]:
        """In an answer: OpenAI's fields, and this server's, which also stand where OpenAI's has `cached_tokens`."""
        reused = {
            "cached_tokens": self.cached_tokens,
            "repos_tokens": self.repos_tokens,
            "drop_skipped_tokens": self.drop_skipped_tokens,
        }
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            **reused,
            "prefill_tokens": self.prefill_tokens,
            "prompt_tokens_details": reused,
        }


@dataclass(kw_only=True, slots=True)
class Answer:
    """The form of one request's answer: a text completion, or one of a chat."""

    tokenizer: Any
    model: str
    is_chat: bool
    with_logprobs: bool
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    _token_texts: dict[int, str] = field(default_factory=dict)

    def whole(self, outputs: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        choices = [self._choice(index, piece) for index, piece in enumerate(outputs)]
        return self._envelope("chat.completion" if self.is_chat else "text_completion", choices) | {"usage": usage.fields()}

    def opening(self, index: int) -> dict[str, Any]:
        """The chunk that begins a sample of a chat."""
        delta = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return self._envelope("chat.completion.chunk", [delta])

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """A piece of one sample."""
        choice = self._choice(index, piece)
        if self.is_chat:
            choice["delta"] = {"content": choice.pop("message")["content"]}
        return self._envelope("chat.completion.chunk" if self.is_chat else "text_completion", [choice])

    def closing(self, usage: Usage) -> dict[str, Any]:
        """The chunk of the numbers of tokens."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return self._envelope(kind, []) | {"usage": usage.fields()}

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        identity = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.identity}"
        return {"id": identity, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        common = {"index": index, "logprobs": None, "finish_reason": piece.finish_reason}
        if self.is_chat:
            logprobs = {"content": self._chat_logprobs(piece.tokens), "refusal": None} if self.with_logprobs else None
            return common | {"message": {"role": "assistant", "content": piece.text}, "logprobs": logprobs}
        logprobs = self._text_logprobs(piece.tokens) if self.with_logprobs else None
        return common | {"text": piece.text, "logprobs": logprobs}

    def _token(self, token_id: int) -> str:
        if token_id not in self._token_texts:
            self._token_texts[token_id] = self.tokenizer.decode([token_id])
        return self._token_texts[token_id]

    def _text_logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        return {
            "tokens": [self._token(token.choice.token_id) for token in tokens],
            "token_logprobs": [_finite(token.choice.logprob) for token in tokens],
            "top_logprobs": [
                None if token.choice.logprob is None else self._by_text(token.choice.top_logprobs) for token in tokens
            ],
            "text_offset": [token.offset for token in tokens],
        }

    def _by_text(self, top_logprobs: Sequence[tuple[int, float]]) -> Mapping[str, float | None]:
        found: dict[str, float | None] = {}
        for token_id, logprob in top_logprobs:
            found.setdefault(self._token(token_id), _finite(logprob))  # of two tokens with one text the likelier is given
        return found

    def _chat_logprobs(self, tokens: Sequence[Token]) -> list[dict[str, Any]]:
        return [
            self._chat_token(token.choice.token_id, token.choice.logprob)
            | {"top_logprobs": [self._chat_token(token_id, logprob) for token_id, logprob in token.choice.top_logprobs]}
            for token in tokens
        ]

    def _chat_token(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        text = self._token(token_id)
        is_whole = "\ufffd" not in text  # a token may hold part of a character
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode()) if is_whole else None}
