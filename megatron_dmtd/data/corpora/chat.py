"""Chats to text through the tokenizer's chat template, and which characters of it the assistant wrote.

What a template writes is the document: nothing is put before or after it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from megatron_dmtd.data.corpora.documents import Messages
from megatron_dmtd.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: stands for a turn's text, to find where the template puts it; no template can alter or strip it
_SENTINEL = "sentinelofaturn"
Span = tuple[int, int]


class ChatError(Exception):
    """A chat that the template refuses, or whose assistant turns cannot be told from the rest."""


class ChatRenderer:
    """The chat template of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Raises `DataError` if the tokenizer has no chat template."""
        if not tokenizer.chat_template:
            raise DataError(
                found=f"the tokenizer in {tokenizer.name_or_path} has no chat template",
                required="a chat template, to write chats as text",
                remedy="add chat_template.jinja to its folder, or read a text with --text-key",
            )
        self._tokenizer = tokenizer
        self._template = tokenizer.get_chat_template()
        self._marks_turns = re.search(r"\{%-?\s*generation\s*-?%\}", self._template) is not None
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")

    def render(self, messages: Messages, *, prompt: bool = False) -> str:
        """The chat as text; with `prompt`, up to where the assistant begins to write. Raises `ChatError`."""
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # a template may raise anything on a chat that it does not support
            raise ChatError(f"the chat template refuses it: {error}") from error
        assert isinstance(text, str), type(text)
        return text

    def render_with_spans(self, messages: Messages) -> tuple[str, list[Span]]:
        """The chat as text, and the spans of characters that the assistant wrote, each with its end-of-turn token.

        Marks that templates make themselves (`{% generation %}`) are used. Otherwise a turn begins where the template asks for it
        to be generated, and ends with the first special token after it. Raises `ChatError` where this finds no turn.
        """
        if self._marks_turns:
            return self._marked(messages)
        text = self.render(messages)
        turns = [nth for nth, message in enumerate(messages) if message["role"] == "assistant"]
        return text, [self._span(text, messages, nth) for nth in turns]

    def _marked(self, messages: Messages) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        values: dict[str, Any] = dict(self._tokenizer.special_tokens_map)
        try:
            rendered: Any = render_jinja_template(
                conversations=[messages], chat_template=self._template, return_assistant_tokens_mask=True, **values
            )
        except Exception as error:  # as above
            raise ChatError(f"the chat template refuses it: {error}") from error
        (text,), (spans,) = rendered
        return text, [(int(begin), int(end)) for begin, end in spans]

    def _span(self, text: str, messages: Messages, nth: int) -> Span:
        before = self.render(messages[:nth], prompt=True)
        replaced = [*messages[:nth], {**messages[nth], "content": _SENTINEL}, *messages[nth + 1 :]]
        _, found, after = self.render(replaced).rpartition(_SENTINEL)
        end = len(text) - len(after)
        if not found or not text.startswith(before) or not text.endswith(after) or end < len(before):
            raise ChatError(
                f"the chat template does not show where assistant turn {nth + 1} lies; mark it with {{% generation %}}"
            )
        end_of_turn = self._special.search(text, end)
        return len(before), end if end_of_turn is None else end_of_turn.end()
