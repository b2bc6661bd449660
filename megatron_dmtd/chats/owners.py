"""Which part of a written chat belongs to which message, and whether that part is what it was when the message was the last one.

A message owns what the template's loop over messages writes for it: its header, its contents, and what ends it. The prompt with
which the assistant begins belongs to none. What stands before all messages belongs to the first one if that is a system message,
which many templates write before their loop, and otherwise to none.

A request names messages of a text that grew over several requests. If a template writes an earlier message in another way once
others follow (thoughts that are left out after the next question), then what was cached, and what the model had read when it
wrote its answers, is another text. That is found by rendering the earlier requests and comparing.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from megatron_dmtd.chats.template import ChatTemplate, Span
from megatron_dmtd.chats.turns import Chat, ChatError

#: Messages that are rendered again for comparison, at most, for one request: rendering takes some 20 microseconds for each.
_MOST_RENDERED = 100_000
#: Beginnings of chats that were compared, remembered by their digests: each turn of an agent adds one to those of the last.
_MOST_REMEMBERED = 100_000


@dataclass(frozen=True, slots=True)
class OwnedText:
    """A chat as text."""

    text: str
    spans: tuple[Span | None, ...]
    """Characters of each message, in rising order; None where the template does not show them."""


def render_with_owners(template: ChatTemplate, chat: Chat, *, bos: str | None) -> OwnedText:
    """The chat up to where the assistant begins to write, and its messages there. `bos`: what begins a text, if anything does.

    Raises:
        ChatError: The template refuses the chat, or its messages cannot be told apart.
    """
    text, found = template.render_traced(chat, prompt=True)
    spans = list(found)
    first = next((span[0] for span in spans if span is not None), None)
    if first and spans[0] is None and chat.messages[0]["role"] in ("system", "developer") and spans[1:2] != [None]:
        begin = len(bos) if bos and text.startswith(bos) else 0
        # A template that keeps it for a later question, say, writes nothing here.
        spans[0] = (begin, first) if begin < first else None
    last = 0
    for span in spans:
        if span is not None and span[0] < last:
            raise ChatError("the chat template writes messages in another order than they are given")
        last = span[1] if span is not None else last
    return OwnedText(text, tuple(spans))


class Beginnings:
    """Compares chats with the shorter ones that they grew from, and remembers what it has compared."""

    def __init__(self) -> None:
        self._texts: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, template: ChatTemplate, chat: Chat, owned: OwnedText, numbers: Iterable[int]) -> None:
        """Accept a chat whose text up to each message of `numbers` has not changed since the request that ended with it.

        A request ends before a turn of the assistant, so the message and those up to the next such turn are rendered. Of very
        many, the first, the last and as many between are compared as fit into a bound.

        Raises:
            ChatError: Some message is written in another way now.
        """
        ends = sorted({_end_of_request(chat, number) for number in numbers})
        ends = [end for end in ends if end + 1 < len(chat.messages) and owned.spans[end] is not None]
        if not ends:
            return
        keys, texts = _digests_of_chats(template, chat, ends), _digests_of_texts(owned, ends)
        with self._lock:
            unknown = [end for end, key, text in zip(ends, keys, texts, strict=True) if self._texts.get(key) != text]
        for end in _within_bound(unknown):
            earlier = replace(chat, messages=chat.messages[: end + 1])
            span = owned.spans[end]
            assert span is not None
            if template.render(earlier) != owned.text[: span[1]]:
                raise ChatError(
                    f"the chat template writes messages up to {end} in another way now that others follow, so what was cached of "
                    f"them belongs to another text (leave out what the template drops later, or give token ids)"
                )
        with self._lock:
            for key, text in zip(keys, texts, strict=True):
                self._texts[key] = text
                self._texts.move_to_end(key)
            while len(self._texts) > _MOST_REMEMBERED:
                self._texts.popitem(last=False)


def _end_of_request(chat: Chat, number: int) -> int:
    """The last message of the first request that held message `number`."""
    end, last = number, len(chat.messages) - 1
    if chat.messages[end]["role"] == "assistant":
        end = min(end + 1, last)
    while end < last and chat.messages[end + 1]["role"] != "assistant":
        end += 1
    return end


def _digests_of_chats(template: ChatTemplate, chat: Chat, ends: Sequence[int]) -> list[bytes]:
    """Of everything that decides the text up to each end."""
    common = json.dumps([template.source, chat.tools, chat.documents, chat.values], sort_keys=True, default=str)
    digest, found, wanted = sha256(common.encode("utf-8", "surrogatepass")), [], set(ends)
    for number, message in enumerate(chat.messages):
        digest.update(json.dumps(message, sort_keys=True, default=str).encode("utf-8", "surrogatepass") + b"\n")
        if number in wanted:
            found.append(digest.digest())
    return found


def _digests_of_texts(owned: OwnedText, ends: Sequence[int]) -> list[bytes]:
    digest, found, begin = sha256(), [], 0
    for end in ends:
        span = owned.spans[end]
        assert span is not None
        digest.update(owned.text[begin : span[1]].encode("utf-8", "surrogatepass"))
        begin = span[1]
        found.append(digest.digest())
    return found


def _within_bound(ends: list[int]) -> list[int]:
    """Those to render: all, or the first, the last and evenly spaced ones between."""
    if not ends or sum(ends) + len(ends) <= _MOST_RENDERED:
        return ends
    count = max(2, _MOST_RENDERED // (ends[-1] + 1))
    return sorted({ends[round(index * (len(ends) - 1) / (count - 1))] for index in range(count)})
