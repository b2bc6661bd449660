"""A page of text, tables, pictures and texts side by side, as Markdown and as one HTML file that needs no others.

Text may hold `code`, **bold** and [links](https://example.org), as in Markdown.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; color: #222; }
img { max-width: 100%; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { border: 1px solid #ccc; padding: .3em .7em; text-align: left; vertical-align: top; }
th { background: #f3f3f3; }
pre { white-space: pre-wrap; background: #f7f7f7; padding: .6em; margin: 0; font-size: 14px; }
"""


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading of level 1 or 2."""

    text: str
    level: int = 2

    def markdown(self) -> str:
        """See `to_markdown`."""
        return f"{'#' * self.level} {self.text}"

    def html(self) -> str:
        """See `to_html`."""
        return f"<h{self.level}>{_inline(self.text)}</h{self.level}>"


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Text."""

    text: str

    def markdown(self) -> str:
        """See `to_markdown`."""
        return self.text

    def html(self) -> str:
        """See `to_html`."""
        return f"<p>{_inline(self.text)}</p>"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells below a head."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """See `to_markdown`."""
        rule = "|" + " --- |" * len(self.head)
        return "\n".join((_row(self.head), rule, *map(_row, self.rows)))

    def html(self) -> str:
        """See `to_html`."""
        head = "".join(f"<th>{_inline(cell)}</th>" for cell in self.head)
        rows = ("".join(f"<td>{_inline(cell)}</td>" for cell in row) for row in self.rows)
        return f"<table>\n<tr>{head}</tr>\n" + "\n".join(f"<tr>{row}</tr>" for row in rows) + "\n</table>"


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Texts next to each other, kept as they are; Markdown has HTML for that."""

    head: Sequence[str]
    texts: Sequence[str]

    def markdown(self) -> str:
        """See `to_markdown`."""
        return self.html()

    def html(self) -> str:
        """See `to_html`."""
        width = 100 // len(self.head)
        head = "".join(f'<th width="{width}%">{_inline(cell)}</th>' for cell in self.head)
        # An empty line would end the block of HTML inside Markdown.
        texts = (html.escape(text.strip("\n")).replace("\n", "<br>") for text in self.texts)
        cells = "".join(f"<td>{text}</td>" for text in texts)
        return f"<table>\n<tr>{head}</tr>\n<tr>{cells}</tr>\n</table>"


@dataclass(frozen=True, slots=True)
class Code:
    """Commands."""

    text: str

    def markdown(self) -> str:
        """See `to_markdown`."""
        return f"```bash\n{self.text}\n```"

    def html(self) -> str:
        """See `to_html`."""
        return f"<pre>{html.escape(self.text)}</pre>"


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG next to the page."""

    path: Path
    words: str

    def markdown(self) -> str:
        """See `to_markdown`."""
        return f"![{self.words}]({self.path.name})"

    def html(self) -> str:
        """See `to_html`."""
        data = base64.b64encode(self.path.read_bytes()).decode()
        return f'<p><img alt="{html.escape(self.words)}" src="data:image/png;base64,{data}"></p>'


Block = Heading | Paragraph | Table | SideBySide | Code | Picture


def to_markdown(blocks: Iterable[Block]) -> str:
    """The page as Markdown."""
    return "\n\n".join(block.markdown() for block in blocks) + "\n"


def to_html(blocks: Iterable[Block], *, title: str) -> str:
    """The page as HTML, its pictures inside."""
    body = "\n".join(block.html() for block in blocks)
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return f"<!DOCTYPE html>\n<html><head>{head}</head>\n<body>\n{body}\n</body></html>\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _inline(text: str) -> str:
    escaped = html.escape(text)
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped)
    escaped = re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", escaped)
    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", r'<a href="\2">\1</a>', escaped)
