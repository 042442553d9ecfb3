"""What a notebook shows of the package: source, two sources side by side, a figure.

Each function returns something that JupyterLab draws as HTML (or PNG) and that prints as plain text, so that a
committed notebook can be read without a kernel, and on a page that strips styles. Code is shown as it stands in the
package, never a copy. Knows no lesson. Laws: tests/test_show.py.
"""

from __future__ import annotations

import difflib
import html
import inspect
import io
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.display import Image
    from matplotlib.figure import Figure

Shown = type | Callable[..., Any]
FILL = {  # by the mark between the columns, for those who see no colour
    " ": "",
    "|": "background:#fff3d6",
    "<": "background:#fde3df",
    ">": "background:#dff3e2",
}
CELL = "padding:0 .6em;text-align:left;white-space:pre-wrap;vertical-align:top;border:none;overflow-wrap:anywhere"
CODE = "font-family:monospace;line-height:1.35;color:#222;background:#fff"
TABLE = f"{CODE};width:100%;border-collapse:collapse;font-size:11px"
TEXT_WIDTH = 76  # characters of a column in plain text
PNG_LIMIT = 80_000  # bytes: a committed picture


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: the same line of both, or what stands there instead of it."""

    mark: str
    left: str
    right: str


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Two sources, aligned. `str()` is the table in plain text."""

    left: str
    right: str
    rows: list[Row] = field(repr=False)

    def __str__(self) -> str:
        rows = [Row(" ", self.left, self.right), Row(" ", "-" * len(self.left), "-" * len(self.right)), *self.rows]
        return "\n".join(line for row in rows for line in _text_lines(row))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        sides = [f"<th style='{CELL};width:50%'>{name}</th>" for name in (self.left, self.right)]
        head = f"<tr>{'<th></th>'.join(sides)}</tr>"
        body = "".join(_html_row(row) for row in self.rows)
        return f"<div style='overflow-x:auto'><table style='{TABLE}'>{head}{body}</table></div>"


@dataclass(frozen=True, slots=True)
class Source:
    """One source. `str()` is its text."""

    name: str
    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        code = "\n".join(_highlight(self.text))
        return f"<pre style='{CODE};padding:.6em;margin:0;overflow-x:auto;white-space:pre;font-size:12px'>{code}</pre>"


def show_source(shown: Shown, *methods: str) -> Source:
    """The source of a class or function, or only the named methods of a class. ValueError for an unknown method, and
    for something without Python source."""
    name = shown.__qualname__
    if not methods:
        return Source(name, source_of(shown))
    return Source(name, f"class {name}:\n" + "\n\n".join(textwrap.indent(_method(shown, m), "    ") for m in methods))


def show_diff(left: Shown, right: Shown, *methods: str) -> SideBySide:
    """Two classes or functions side by side, equal lines beside each other; or only the named methods, each of which
    either class may lack. ValueError as in `show_source`."""
    if not methods:
        rows = list(_align(source_of(left), source_of(right)))
        return SideBySide(left.__qualname__, right.__qualname__, rows)
    rows = []
    for method in methods:
        ours, theirs = (_method(c, method) if method in vars(c) else "" for c in (left, right))
        if not ours and not theirs:
            raise ValueError(f"neither {left.__qualname__} nor {right.__qualname__} defines {method!r}; name another.")
        rows += [*_align(ours, theirs), Row(" ", "", "")]
    return SideBySide(left.__qualname__, right.__qualname__, rows[:-1])


def show_figure(figure: Figure) -> Image:
    """As a PNG with a palette of 128 colours, in which a rare one keeps its place; its title as alternative text.
    ValueError above PNG_LIMIT bytes."""
    from IPython.display import Image
    from PIL import Image as Pixels

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    pixels = Pixels.open(drawn).convert("RGB")
    pixels.quantize(128, Pixels.Quantize.MAXCOVERAGE, dither=Pixels.Dither.NONE).save(small, "PNG", optimize=True)
    data = small.getvalue()
    if len(data) > PNG_LIMIT:
        raise ValueError(f"the picture has {len(data):,} bytes, the limit is {PNG_LIMIT:,}; draw fewer marks.")
    return Image(data=data, format="png", alt=figure.get_suptitle().replace("\n", ", "))


def source_of(shown: Shown) -> str:
    """Dedented. ValueError where Python keeps no source."""
    try:
        return textwrap.dedent(inspect.getsource(shown)).rstrip("\n")
    except (OSError, TypeError):
        raise ValueError(f"{shown!r} has no Python source; name a class or function of the package.") from None


def _method(cls: Shown, name: str) -> str:
    method = vars(cls).get(name)
    if method is None:
        raise ValueError(f"{cls.__qualname__} does not define {name!r}; name one of its own methods.")
    found: Any = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
    return source_of(found)


def _align(left: str, right: str) -> Iterator[Row]:
    ours, theirs = left.splitlines(), right.splitlines()
    for _, a, b, c, d in difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        for one, other in zip_longest(ours[a:b], theirs[c:d]):
            row = Row(" ", one or "", other or "")
            mark = "|" if row.left and row.right else "<" if row.left else ">"
            yield row if row.left == row.right else replace(row, mark=mark)


def _text_lines(row: Row) -> Iterator[str]:
    """A long line of code goes on in the next line of its column."""
    left, right = (_fold(text) for text in (row.left, row.right))
    for number, (one, other) in enumerate(zip_longest(left, right, fillvalue="")):
        mark = row.mark if number == 0 else " "
        yield f"{one:<{TEXT_WIDTH}} {mark} {other}".rstrip()


def _fold(text: str) -> list[str]:
    indent = " " * (len(text) - len(text.lstrip()) + 8)
    return textwrap.wrap(text, TEXT_WIDTH, subsequent_indent=indent, break_long_words=False) or [""]


def _html_row(row: Row) -> str:
    left, right = (_html_line(text) for text in (row.left, row.right))
    fill = FILL[row.mark]
    cells = (left, html.escape(row.mark.strip()), right)
    ours, theirs = (fill if row.mark in f"|{mark}" else "" for mark in "<>")
    fills = (f"{_hang(row.left)};{ours}", "color:#666", f"{_hang(row.right)};{theirs}")
    return (
        "<tr style='background:none'>"
        + "".join(f"<td style='{CELL};{style}'>{text}</td>" for text, style in zip(cells, fills, strict=True))
        + "</tr>"
    )


def _html_line(text: str) -> str:
    """Some pages drop spaces that begin a cell: an indentation is made of spaces that they keep."""
    code = text.lstrip()
    return "&nbsp;" * (len(text) - len(code)) + _highlight(code)[0] if code else "&nbsp;"


def _hang(text: str) -> str:
    """A line that is too long goes on below its own beginning."""
    indent = len(text) - len(text.lstrip()) + 4
    return f"padding-left:calc(.6em + {indent}ch);text-indent:-{indent}ch"


def _highlight(text: str) -> list[str]:
    """Lines as HTML with inline colours, so that a notebook needs no style sheet."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    lexer = PythonLexer(stripnl=False, stripall=False)
    return highlight(text, lexer, HtmlFormatter(nowrap=True, noclasses=True)).rstrip("\n").split("\n")
