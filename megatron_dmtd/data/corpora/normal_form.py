"""Whether a text is in normal form C, as the `tokenizers` library sees it.

Unicode's tables grow, and two libraries seldom have the same version: they then disagree on the order of rare combining marks. So
no other normal form is used. This module only decides which parts of a text have to be given to `tokenizers` at all.
"""

from __future__ import annotations

import re

#: characters that no normal form C changes, now or later (Unicode promises it for characters once assigned): they stand for
#: themselves, combine with no character before them, and order themselves behind none
SAFE = (
    "\x00-\x7f\xa0-\u02ff\u0400-\u0482\u048a-\u052f\u2010-\u2027\u2030-\u205e\u2190-\u2328\u232b-\u2a00\u3001-\u3029\u3041-\u3096"
    "\u30a0-\u30ff\u4e00-\u9fff\uac00-\ud7a3\uff01-\uff60\U0001f300-\U0001faff"
)
_DOUBTFUL = re.compile(f"[^{SAFE}]+")


class NormalForm:
    """The reference's normal form C."""

    def __init__(self) -> None:
        from tokenizers import normalizers

        self._reference = normalizers.NFC()

    def of(self, text: str) -> str:
        """The text in normal form."""
        normalised: str = self._reference.normalize_str(text)
        return normalised

    def holds(self, text: str) -> bool:
        """Whether normalisation leaves the text unchanged; then it changes no part of it either."""
        if text.isascii():
            return True
        # A doubtful character can change only with its doubtful neighbours and the character before them.
        doubtful = "\n".join(text[max(found.start() - 1, 0) : found.end()] for found in _DOUBTFUL.finditer(text))
        return not doubtful or self._reference.normalize_str(doubtful) == doubtful
