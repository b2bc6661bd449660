"""Documents: what a record of a source becomes, what is wrong with one that cannot be used, and which are held out.

It knows neither files nor tokens. Nothing is ever dropped silently: whatever is not a `Document` is a `BadDocument`, which its
reader either refuses by name or counts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from megatron_dmtd.chats.turns import RECORD_FIELDS, REFUSED_FIELDS, Chat, ChatError, read_chat, texts_of
from megatron_dmtd.errors import DataError
from megatron_dmtd.infra.digests import stable_hash

Split = Literal["all", "train", "heldout"]
#: why a document cannot be used; what `--skip-bad` counts
BadKind = Literal[
    "not JSON",
    "no such key",
    "unreadable value",
    "not a string",
    "not UTF-8",
    "empty",
    "damaged file",
    "no chat",
    "control token",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text or one chat, and its name, which decides its split."""

    name: str
    text: str = ""
    """The text; empty for a chat."""
    chat: Chat | None = None
    """None for a text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadDocument:
    """A place in the source without a usable document, and the reason."""

    name: str
    kind: BadKind
    found: str
    """Where it is (file and line), and what is there."""
    required: str

    def error(self) -> DataError:
        """What a strict reader raises."""
        remedy = "correct it, name another key (--text-key, --messages-key), or leave such documents out with --skip-bad"
        return DataError(found=self.found, required=self.required, remedy=remedy)


def is_text(text: str) -> bool:
    """Whether `text` can be written as UTF-8. JSON can hold halves of surrogate pairs, which no tokenizer accepts."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordKeys:
    """Which field of a record holds its text, or its chat."""

    text: str = "text"
    messages: str | None = None
    """The key of a list of turns. None: records hold a text."""

    @property
    def description(self) -> str:
        """The key in words."""
        return f"key {self.key!r}"

    @property
    def key(self) -> str:
        """The key that is read."""
        return self.text if self.messages is None else self.messages

    @property
    def columns(self) -> tuple[str, ...]:
        """Every field that a record may have and that matters; only the key must be there."""
        others = () if self.messages is None else (*RECORD_FIELDS, *REFUSED_FIELDS)
        return (self.key, *(name for name in others if name != self.key))

    @property
    def required(self) -> str:
        """What a record must hold."""
        if self.messages is None:
            return f"one JSON object per line, with a string under {self.text!r}"
        return f"one JSON object per line, with a list of turns, each with a role, under {self.messages!r}"

    def parse(self, line: bytes, *, name: str, where: str) -> Document | BadDocument:
        """The document of one line of a .jsonl file."""
        try:
            text = line.decode("utf-8-sig")  # a file that was joined from several may have byte order marks at any line
        except UnicodeDecodeError as error:
            return BadDocument(name=name, kind="not UTF-8", found=f"{where}: {error}", required="UTF-8")
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            return BadDocument(name=name, kind="not JSON", found=f"{where}: {error}", required=self.required)
        if not isinstance(record, dict):
            found = f"{where}: {type(record).__name__}"
            return BadDocument(name=name, kind="not JSON", found=found, required=self.required)
        return self.document(record, name=name, where=where)

    def document(self, record: dict[str, Any], *, name: str, where: str) -> Document | BadDocument:
        """The document of one record."""
        if self.key not in record:
            found = f"{where}: an object with the keys {sorted(record)}"
            return BadDocument(name=name, kind="no such key", found=found, required=self.required)
        value = record[self.key]
        if self.messages is not None:
            return self._chat(record, name=name, where=where)
        if not isinstance(value, str):
            found = f"{where}: {type(value).__name__} in an object with the keys {sorted(record)}"
            return BadDocument(name=name, kind="not a string", found=found, required=self.required)
        return text_document(value, name=name, where=where)

    def _chat(self, record: dict[str, Any], *, name: str, where: str) -> Document | BadDocument:
        if record[self.key] == []:
            return BadDocument(name=name, kind="empty", found=f"{where}: an empty chat", required=self.required)
        try:
            chat = read_chat(record, self.key)
        except ChatError as error:
            return BadDocument(name=name, kind="no chat", found=f"{where}: {error}", required=self.required)
        if not all(map(is_text, texts_of([chat.messages, chat.tools, chat.documents, chat.values]))):
            return _surrogate(name, where)
        return Document(name=name, chat=chat)


def text_document(text: str, *, name: str, where: str) -> Document | BadDocument:
    """A text that is not empty and can be written."""
    if not text:
        return BadDocument(name=name, kind="empty", found=f"{where}: an empty document", required="documents with text")
    if not is_text(text):
        return _surrogate(name, where)
    return Document(name=name, text=text)


def _surrogate(name: str, where: str) -> BadDocument:
    return BadDocument(name=name, kind="not UTF-8", found=f"{where}: half a surrogate pair", required="text that UTF-8 can hold")


def check_fraction(heldout_fraction: float) -> None:
    """Raise `DataError` unless this is a fraction of the documents that leaves some for training."""
    if not 0 <= heldout_fraction < 1:
        raise DataError(
            found=f"a held-out fraction of {heldout_fraction}",
            required="at least 0 and less than 1",
            remedy="0.02 holds out one document in fifty",
        )


def is_heldout(name: str, fraction: float) -> bool:
    """Whether the document `name` is held out: a pure function of its name, the same on every machine and in every run.

    A larger `fraction` holds out a superset.
    """
    return stable_hash(name) < fraction * 2**64


def in_split(name: str, split: Split, fraction: float) -> bool:
    """Whether the document `name` belongs to `split`; `train` and `heldout` are disjoint and together all."""
    return split == "all" or (split == "heldout") == is_heldout(name, fraction)
