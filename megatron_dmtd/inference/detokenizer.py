"""The text of an output as its tokens arrive, up to the first stop string.

Text is given in pieces that will not change any more. A character may take several tokens, and a token's text may depend on the
one before it (SentencePiece writes a space before every word but the first). So each piece is the difference of two decodings
that begin at a token whose text has been given already; both are short, however long the output is.

Special tokens, such as an end of turn, are not part of the text, as with `skip_special_tokens=True` of transformers. A stop
string may still name one: it is then found where that token is, and not inside the token's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from megatron_dmtd.errors import ConfigError

#: Most tokens of a character: one for each of its bytes.
TOKENS_PER_CHARACTER = 4
#: After this many tokens without a whole character their text is given as it is: a model may produce such bytes forever.
MAX_PENDING_TOKENS = 2 * TOKENS_PER_CHARACTER
#: What tokenizers give for bytes that are not, or not yet, a character.
_REPLACEMENT = "\ufffd"
#: Code points that occur in no text; they stand for the special tokens named in stop strings.
_FIRST_SYMBOL, _NUM_SYMBOLS = 0xD800, 0x800


class TokenDecoder:
    """A tokenizer's conversion of ids to text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_texts: Mapping[int, str] = {
            token_id: tokenizer.decode([token_id], skip_special_tokens=False)
            for token_id in sorted(added | set(tokenizer.all_special_ids))
            if not tokenizer.decode([token_id], skip_special_tokens=True)
        }
        """Special tokens and their names."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of some tokens, without special ones. Spaces are left as they are."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Detokenizer:
    """The text of one output. After each `add`, `take` gives what has become certain."""

    def __init__(self, decoder: TokenDecoder, prompt_ids: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        """`prompt_ids` are what the output follows: the text of its first token may depend on their last ones."""
        self._pieces = _Pieces(decoder, _context(decoder, prompt_ids))
        self._special_texts = decoder.special_texts
        self._search = _StopSearch(decoder.special_texts, stop)
        self._num_taken = 0
        self._is_finished = False

    @property
    def found_stop(self) -> bool:
        """Whether a stop string is complete: the output ends."""
        return self._search.end is not None

    @property
    def text(self) -> str:
        """All text so far, up to the stop string if there was one."""
        return self._search.text[: self._search.end]

    @property
    def num_characters(self) -> int:
        """Length of all text so far, including that of a stop string."""
        return len(self._search.text)

    def add(self, token_id: int) -> None:
        """Add one token."""
        assert not self._is_finished, "the output has ended"
        if token_id in self._special_texts:
            self._search.add_special(token_id)
        else:
            self._search.add(self._pieces.add(token_id))

    def finish(self) -> str:
        """End the output: text that was held back is given now, such as an incomplete character. Returns the whole text."""
        if not self._is_finished:
            self._is_finished = True
            if not self.found_stop:
                self._search.add(self._pieces.rest())
        return self.text

    def take(self) -> str:
        """Text that has become certain since the last call. Text that may be the beginning of a stop string is held back."""
        certain = len(self.text) if self._is_finished or self.found_stop else self.num_characters - self._search.held_back
        piece = self._search.text[self._num_taken : max(certain, self._num_taken)]
        self._num_taken += len(piece)
        return piece


def _context(decoder: TokenDecoder, prompt_ids: Sequence[int]) -> list[int]:
    """The last few ids of a prompt, special ones left out, from the beginning of a character; if the prompt ends inside one, of
    that one.
    """
    ordinary = (token_id for token_id in reversed(prompt_ids) if token_id not in decoder.special_texts)
    last = list(islice(ordinary, 2 * TOKENS_PER_CHARACTER))[::-1]

    def is_whole(begin: int, end: int) -> bool:
        return _REPLACEMENT not in decoder.decode(last[begin:end])

    if decoder.decode(last).endswith(_REPLACEMENT):
        begins = (end for end in range(len(last) - 1, 0, -1) if any(is_whole(begin, end) for begin in range(end)))
    else:
        begins = (begin for begin in range(len(last)) if is_whole(begin, len(last)))
    return last[next(begins, 0) :]


class _Pieces:
    """Text of ordinary tokens, in pieces that will not change any more."""

    def __init__(self, decoder: TokenDecoder, context: list[int]) -> None:
        self._decoder = decoder
        self._ids = context
        """Tokens whose text has been given, as context, then pending ones."""
        self._num_context = len(context)
        self._num_given = 0
        """Characters of the pending tokens that have been given."""

    @property
    def _num_pending(self) -> int:
        return len(self._ids) - self._num_context

    def add(self, token_id: int) -> str:
        """The text that has become certain with one more token; empty inside a character."""
        self._ids.append(token_id)
        new = self._new_text()
        certain = "" if new is None else new.rstrip(_REPLACEMENT)
        piece = certain[self._num_given :]
        goes_on = self._known().endswith(_REPLACEMENT)  # the context ends inside a character
        if certain == new and (new or not goes_on):
            # A character that began in the context needs all its tokens to be read again.
            self._settle(0 if goes_on else self._num_context, len(self._ids))
            return piece
        self._num_given += len(piece)
        return piece + self._decided() if self._num_pending > MAX_PENDING_TOKENS else piece

    def rest(self) -> str:
        """The rest at the end: an incomplete character."""
        new = self._new_text()
        return (self._alone() if new is None else new)[self._num_given :]

    def _known(self) -> str:
        return self._decoder.decode(self._ids[: self._num_context])

    def _alone(self) -> str:
        return self._decoder.decode(self._ids[self._num_context :])

    def _new_text(self) -> str | None:
        """Text of the pending tokens after their context; None while they change the context's text (a byte-level decoder may
        treat a whole run of bytes as broken until the last one is there).
        """
        known, whole = self._known(), self._decoder.decode(self._ids)
        if whole.startswith(known):
            return whole[len(known) :]
        if known.endswith(_REPLACEMENT):  # the context ends inside a character, which goes on here
            differing = (index for index, (one, other) in enumerate(zip(known, whole)) if one != other)
            return whole[next(differing, len(whole)) :]
        return None

    def _decided(self) -> str:
        """Give text to the pending tokens although they may end inside a character: all of them but the fewest that do."""
        whole = self._alone()
        for count in range(self._num_pending - 1, self._num_pending - TOKENS_PER_CHARACTER, -1):
            split = self._num_context + count
            first = self._decoder.decode(self._ids[self._num_context : split])
            if first + self._decoder.decode(self._ids[split:]) == whole:
                break
        else:
            first, count = whole, self._num_pending
        piece = first[self._num_given :]
        self._settle(self._num_context + count, self._num_context + count)
        return piece

    def _settle(self, start: int, given: int) -> None:
        """The text of the first `given` tokens has been given; those from `start` are the context of what comes."""
        self._ids = self._ids[start:]
        self._num_context, self._num_given = given - start, 0


class _StopSearch:
    """The text so far, searched for stop strings as it grows.

    There are two views of it. The text itself is searched for the strings as they are. If strings name special tokens, a second
    view has a symbol in the place of each such token, and is searched for the strings with symbols in the place of the names.
    """

    def __init__(self, special_texts: Mapping[int, str], stop: Sequence[str]) -> None:
        self.text = ""
        self.end: int | None = None
        """Where in `text` the first complete stop string begins."""
        self.held_back = max((len(string) - 1 for string in stop), default=0)
        """Characters at the end that may be the beginning of a stop string."""
        self._stop = tuple(stop)
        named = {token_id: text for token_id, text in special_texts.items() if any(text in string for string in stop)}
        if len(named) > _NUM_SYMBOLS:
            raise ConfigError(
                found=f"stop strings that name {len(named)} special tokens",
                required=f"at most {_NUM_SYMBOLS}",
                remedy="give their ids as stop_token_ids",
            )
        self._symbols = {token_id: chr(_FIRST_SYMBOL + index) for index, token_id in enumerate(named)}
        self._marked_stop = _marked(self._stop, {text: self._symbols[token_id] for token_id, text in named.items()})
        self._marked_text = ""

    def add(self, piece: str) -> None:
        """More text follows."""
        if piece:
            self.text += piece
            self._find(self.text, self._stop, len(piece))
            self._add_marked(piece)

    def add_special(self, token_id: int) -> None:
        """A special token follows."""
        self._add_marked(self._symbols.get(token_id, ""))

    def _add_marked(self, piece: str) -> None:
        if self._marked_stop and piece:
            self._marked_text += piece
            self._find(self._marked_text, self._marked_stop, len(piece))

    def _find(self, text: str, strings: Sequence[str], num_new: int) -> None:
        """Look for strings that end in the last `num_new` characters."""
        found = [text.find(string, max(0, len(text) - num_new - len(string) + 1)) for string in strings]
        begins = [_num_ordinary(text[:index]) if self._symbols else index for index in found if index >= 0]
        self.end = min([*begins, *(() if self.end is None else (self.end,))], default=None)


def _marked(strings: Sequence[str], symbols: Mapping[str, str]) -> tuple[str, ...]:
    """The strings that name special tokens, with symbols in the place of the names; of two names the longer one is meant."""
    if not symbols:
        return ()
    names = re.compile("|".join(map(re.escape, sorted(symbols, key=len, reverse=True))))
    return tuple(names.sub(lambda name: symbols[name.group()], string) for string in strings if names.search(string))


def _num_ordinary(text: str) -> int:
    """Characters of a text that are no symbols."""
    return sum(not _FIRST_SYMBOL <= ord(character) < _FIRST_SYMBOL + _NUM_SYMBOLS for character in text)
