"""Read words as bash does in site files and in OPTIONS, and as sbatch does in #SBATCH lines, without running a shell.

Supported is the part of bash's grammar that needs no shell: plain text, backslashes, both kinds of quotes, comments, and
variables in double quotes. Anything else that bash would expand is a `WordError`. Tests compare the words with bash's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_dmtd.errors import ConfigError

_BLANK = " \t"
#: characters that end a word or run a command, outside quotes
_SPECIAL = frozenset("`;&|<>()")
#: characters that bash expands in a list of words, but not in an assignment
_PATTERNS = frozenset("*?[]{}")
#: characters that a backslash escapes in double quotes
_ESCAPED = frozenset('$`"\\')
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))", re.ASCII)
_C_SPACES = " \t\n\v\f\r"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
#: values that sbatch reads correctly without quotes
_PLAIN = re.compile(r"[\w./:=,@%+^\[\]*&|()!~-]*", re.ASCII)


class WordError(ValueError):
    """A text outside the supported grammar: what is wrong, and in which line."""


def read_shell_text(path: Path, what: str, *, remedy: str) -> str:
    """The text of a file that bash reads too. Raises `ConfigError` if there is no file, or if bash would read it differently."""
    if not path.is_file():
        raise ConfigError(found=f"no file {path}", required=what, remedy=remedy)
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(found=f"{path}: {error}", required="a readable file in UTF-8", remedy="save it as UTF-8") from error
    for mark, name in (("\r", "carriage returns, the line ends of Windows"), ("\ufeff", "a byte order mark")):
        if mark in text:
            raise ConfigError(found=f"{path}: {name}", required="a text file as bash reads it", remedy="save it without them")
    return text


class _Reader:
    """A single pass over a text."""

    def __init__(self, text: str, *, variables: Mapping[str, str], is_assignment: bool) -> None:
        self._text = text
        self._variables = variables
        self._is_assignment = is_assignment
        self._at = 0
        if match := _CONTROL.search(text):
            self._at = match.start()
            raise self._error(f"the control character {match[0]!r}")

    def _error(self, what: str) -> WordError:
        before, after = self._text[: self._at], self._text[self._at :]
        line = before[before.rfind("\n") + 1 :] + after.split("\n")[0]
        return WordError(f"{what}: {line.strip()}")

    def words(self) -> list[str]:
        found = []
        while self._skip_blanks_and_comments():
            found.append(self._word())
        return found

    def _peek(self) -> str:
        """The next character, or an empty string at the end."""
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        character = self._peek()
        self._at += 1
        return character

    def _skip_blanks_and_comments(self) -> bool:
        """Advance to the next word. Returns whether there is one."""
        while character := self._peek():
            if character == "#":
                end = self._text.find("\n", self._at)
                self._at = end if end >= 0 else len(self._text)
            elif character in _BLANK + "\n":
                self._at += 1
            else:
                return True
        return False

    def _word(self) -> str:
        parts: list[str] = []
        start = self._at
        while (character := self._peek()) and character not in _BLANK + "\n":
            self._at += 1
            if character == "'":
                parts.append(self._single_quoted())
            elif character == '"':
                parts.append(self._double_quoted())
            elif character == "\\":
                parts.append(self._escaped())
            else:
                parts.append(self._plain(character, start))
        return "".join(parts)

    def _plain(self, character: str, start: int) -> str:
        if character == "$":
            raise self._error("a variable or command outside double quotes")
        if character in _SPECIAL or (character in _PATTERNS and not self._is_assignment):
            raise self._error(f"{character} outside quotes")
        if character == "~" and (self._at - 1 == start or self._text[self._at - 2] in "=:"):
            raise self._error("~ outside quotes")
        return character

    def _escaped(self) -> str:
        character = self._take()
        if character in ("", "\n"):
            raise self._error("a backslash at the end of a line")
        return character

    def _single_quoted(self) -> str:
        return self._until("'", lambda character: character)

    def _double_quoted(self) -> str:
        return self._until('"', self._in_double_quotes)

    def _until(self, quote: str, read: Callable[[str], str]) -> str:
        parts = []
        while (character := self._take()) != quote:
            if character in ("", "\n"):
                raise self._error(f"a quote {quote} that does not end on its line")
            parts.append(read(character))
        return "".join(parts)

    def _in_double_quotes(self, character: str) -> str:
        if character == "\\" and self._peek() in _ESCAPED:
            return self._take()
        if character == "`":
            raise self._error("a command")
        if character != "$":
            return character
        match = _VARIABLE.match(self._text, self._at - 1)
        if match is None or not self._variables:
            raise self._error("a variable or command")
        name = match[1] or match[2]
        if name not in self._variables:
            raise self._error(f"the variable ${name}")
        self._at = match.end()
        return self._variables[name]


def split_words(text: str, *, variables: Mapping[str, str] | None = None) -> list[str]:
    """The words of a list such as `OPTIONS=( … )`, with `variables` substituted inside double quotes."""
    return _Reader(text, variables=variables or {}, is_assignment=False).words()


def read_assignment(line: str) -> tuple[str, str] | None:
    """Name and value of a line `NAME=VALUE`; None for an empty line or a comment."""
    words = _Reader(line, variables={}, is_assignment=True).words()
    if not words:
        return None
    match = re.match(r"[ \t]*([A-Z][A-Z0-9_]*)=", line)
    if match is None:
        raise WordError(f"no NAME=VALUE: {line.strip()}")
    if len(words) > 1:
        raise WordError(f"more than one word: {line.strip()}")
    return match[1], words[0][len(match[1]) + 1 :]


def split_directive(text: str) -> list[str]:
    """The words after `#SBATCH`, as sbatch reads them: quotes, backslashes, and # for a comment, even inside a word."""
    words, word, quote, is_word = [], "", "", False
    characters = iter(text)
    for character in characters:
        if character == "\\":
            word, is_word = word + next(characters, ""), True
        elif quote:
            if character == quote:
                quote = ""
            else:
                word += character
        elif character in "'\"":
            quote, is_word = character, True
        elif character == "#":
            break
        elif character in _C_SPACES:
            words += [word] if is_word else []
            word, is_word = "", False
        else:
            word, is_word = word + character, True
    if quote:
        raise WordError(f"a quote {quote} that does not end")
    return words + ([word] if is_word else [])


def directive(name: str, value: str) -> str:
    """A line `#SBATCH --name=value`, quoted so that sbatch reads exactly this value."""
    if match := re.search(rf"{_CONTROL.pattern}|\n", value):
        raise WordError(f"the control character {match[0]!r}")
    if not _PLAIN.fullmatch(value):
        value = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"#SBATCH --{name}{'=' if value else ''}{value}\n"
