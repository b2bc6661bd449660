"""Which characters of a written chat are the assistant's: what the model would have to generate.

A turn begins where the template, given the turns before it and asked for a prompt, stops. It ends with the last special token
that the template writes after it, or where its text ends if there is none. Both are found by comparing texts that the template
itself writes for the beginnings of the chat; a template that shows neither is refused, never guessed at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_dmtd.chats.template import ChatTemplate, ChatTemplates, Span
from megatron_dmtd.chats.turns import REASONING_FIELDS, Chat, ChatError, Turn

#: characters for private use, one of which stands at both ends of every text of a turn
_MARKS = re.compile("[\U00100000-\U0010fffd]")
_FIRST_MARK, _MOST_TURNS = 0x100000, 0xFFFE
#: names in brackets with which templates let thoughts and answers begin
_TAGS = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")


def render_with_spans(templates: ChatTemplates, chat: Chat) -> tuple[str, list[Span]]:
    """The chat as text, and the spans of characters that the assistant wrote, each with its end-of-turn token.

    Marks that templates make themselves (`{% generation %}`) are used. Raises `ChatError` if a turn cannot be told from the rest.
    """
    template = templates.of(chat)
    if template.marks_turns:
        return template.render_marked(chat)
    finder = _Finder(templates, template, chat)
    return finder.text, finder.spans()


@dataclass(frozen=True, slots=True)
class _Marked:
    """A text, and for the marked texts of each turn where the first of them begins and the last of them ends."""

    text: str
    begins: dict[int, int]
    ends: dict[int, int]

    @property
    def anchor(self) -> tuple[int | None, int]:
        """The turn whose text ends last, and where; None and 0 if no text is marked."""
        return max(self.ends.items(), key=lambda item: item[1], default=(None, 0))


class _Finder:
    """The turns of one chat."""

    def __init__(self, templates: ChatTemplates, template: ChatTemplate, chat: Chat) -> None:
        self._templates, self._template, self._chat = templates, template, chat
        self.text = template.render(chat)
        self._marked_chat: _Marked | None = None

    def spans(self) -> list[Span]:
        """One for each turn of the assistant, in order. Raises `ChatError`."""
        found: list[Span] = []
        for nth, message in enumerate(self._chat.messages):
            if message["role"] != "assistant":
                continue
            span = self._by_beginnings(nth) or self._by_marks(nth)
            if span is None or span[0] < (found[-1][1] if found else 0):
                raise ChatError(
                    f"the chat template does not show where assistant turn {nth + 1} lies, because it writes earlier turns "
                    f"in another way once others follow; mark what the assistant writes with {{% generation %}}"
                )
            found.append(span)
        return found

    def _first(self, count: int) -> Chat:
        return replace(self._chat, messages=self._chat.messages[:count])

    def _by_beginnings(self, nth: int) -> Span | None:
        """Where the chat up to turn `nth`, and up to its end, are beginnings of the whole chat."""
        last = nth + 1 == len(self._chat.messages)
        through = self.text if last else self._template.render(self._first(nth + 1))
        if not self.text.startswith(through):
            return None
        begin = self._first_begin(through) if nth == 0 else self._begin(nth, through)
        return None if begin is None else (begin, self._end(through, begin, self._chat.messages[nth]))

    def _begin(self, nth: int, through: str) -> int | None:
        before = self._template.render(self._first(nth), prompt=True)
        if through.startswith(before):
            return len(before)
        return self._shared(before, through, floor=len(self._template.render(self._first(nth))))

    def _first_begin(self, through: str) -> int | None:
        """Where the turn of a chat that the assistant begins starts: after the prompt that would end it."""
        prompted = self._template.render(self._chat, prompt=True)
        prompt = prompted.removeprefix(self.text) if prompted.startswith(self.text) else ""
        if not prompt:
            return None
        for cut in self._cuts(prompt, floor=0):
            if (place := through.find(prompt[:cut])) >= 0:
                return place + cut
        return None

    def _shared(self, before: str, text: str, *, floor: int) -> int | None:
        """How much of `before`, which ends with a prompt from `floor`, `text` begins with.

        A prompt may end with a space that the template does not write before this turn, or begin a thought that it leaves out.
        """
        return next((cut for cut in self._cuts(before, floor=floor) if text.startswith(before[:cut])), None)

    def _cuts(self, before: str, *, floor: int) -> Iterator[int]:
        """All of `before`, and shorter parts that end where it lets something begin, the longest first."""
        yield len(before)
        tags = {found.start() for pattern in (_TAGS, self._templates.added) for found in pattern.finditer(before, floor)}
        ends = {len(before), *(tag for tag in tags if tag > floor)}
        ends |= {len(before[:end].rstrip()) for end in ends}
        yield from sorted((end for end in ends if floor <= end < len(before) and end > 0), reverse=True)

    def _end(self, through: str, begin: int, message: Turn) -> int:
        """The end of a turn in a text that ends with it: without the white space that separates it from the next one."""
        special = None
        for found in self._templates.special.finditer(through, begin):
            special = found
        if special is not None and not through[special.end() :].strip():
            return special.end()
        content = message.get("content")
        place = through.rfind(content, begin) if isinstance(content, str) and content else -1
        return max(begin, len(through.rstrip()), place + len(content) if content and place >= 0 else 0)

    # Turns of a template that writes earlier ones differently once others follow: Qwen3's leaves out their thoughts.

    def _by_marks(self, nth: int) -> Span | None:
        """What the template writes between the texts of turns, compared with the same in the beginnings of the chat."""
        if self._marked_chat is None:
            self._marked_chat = self._marked(self._chat)
        if nth == 0:
            begin = self._first_begin(self.text)
        else:
            before = self._marked(self._first(nth), prompt=True)
            turn, place = before.anchor
            start = 0 if turn is None else self._marked_chat.ends.get(turn)
            if start is None:
                return None
            floor = len(self._template.render(self._first(nth))) - place
            shared = self._shared(before.text[place:], self.text[start:], floor=max(floor, 0))
            begin = None if shared is None else start + shared
        return None if begin is None else self._end_by_marks(nth, begin)

    def _end_by_marks(self, nth: int, begin: int) -> Span | None:
        assert self._marked_chat is not None
        through = self._marked(self._first(nth + 1))
        turn, place = through.anchor
        start = 0 if turn is None else self._marked_chat.ends.get(turn)
        if start is None:
            return None
        tail = through.text[place : self._end(through.text, place, {})]
        end = start + len(tail)
        inside = {turn for turn, place in self._marked_chat.ends.items() if begin < place <= end}
        inside |= {turn for turn, place in self._marked_chat.begins.items() if begin <= place < end}
        # all of this turn's texts, and none of another's
        whole = nth not in self._marked_chat.ends or (
            begin <= self._marked_chat.begins[nth] and self._marked_chat.ends[nth] <= end
        )
        return (begin, end) if self.text.startswith(tail, start) and begin <= end and whole and inside <= {nth} else None

    def _marked(self, chat: Chat, *, prompt: bool = False) -> _Marked:
        """The text, and where those of its turns lie. Raises `ChatError` if marks change it."""
        text = self._template.render(chat, prompt=prompt)
        messages = self._template.formed(chat.messages)
        if _MARKS.search(text) or len(messages) > _MOST_TURNS:
            raise ChatError("it holds characters for private use, with which turns are told apart; leave them out")
        marked = self._template.render(
            replace(chat, messages=[_marked_turn(message, chr(_FIRST_MARK + nth)) for nth, message in enumerate(messages)]),
            prompt=prompt,
        )
        begins: dict[int, int] = {}
        ends: dict[int, int] = {}
        for number, found in enumerate(_MARKS.finditer(marked)):
            turn, place = ord(found.group()) - _FIRST_MARK, found.start() - number
            begins.setdefault(turn, place)
            ends[turn] = place
        if _MARKS.sub("", marked) != text:
            raise ChatError(
                "the chat template writes earlier turns in another way once others follow, and their texts depending on how they "
                "begin or end; mark what the assistant writes with {% generation %}"
            )
        return _Marked(text, begins, ends)


def _marked_turn(message: Turn, mark: str) -> Turn:
    marked = dict(message)
    for key in ("content", *REASONING_FIELDS):
        if key in message:
            marked[key] = _marked_texts(message[key], mark)
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [_marked_call(call, mark) for call in calls]
    return marked


def _marked_call(call: dict[str, Any], mark: str) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = _marked_texts(function.get("arguments"), mark)
    if arguments != function.get("arguments"):
        function = {**function, "arguments": arguments}
    else:
        function = {**function, "name": _marked_texts(function["name"], mark)}
    return {**call, "function": function} if "function" in call else function


def _marked_texts(value: Any, mark: str) -> Any:
    """All texts in a value, each with marks around it but for its white space."""
    if isinstance(value, str):
        core = value.strip()
        return value.replace(core, f"{mark}{core}{mark}", 1) if core else value
    if isinstance(value, dict):
        return {key: item if key == "type" else _marked_texts(item, mark) for key, item in value.items()}
    return [_marked_texts(item, mark) for item in value] if isinstance(value, list) else value
