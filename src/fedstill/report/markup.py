"""HTML that is whole in itself: every text in it is escaped, and nothing but our own script and style is run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

_NUMBER = re.compile(r"[+-]?\d")
_BREAKS = re.compile(r" (?=[±\[(])")  # where a number may be broken into lines: before its deviation, interval or count
_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="$policy">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
<h1>$title</h1>
<noscript><p class="note">The charts need JavaScript; the tables do not.</p></noscript>
$body
</main>
<script type="module">$script</script>
</body>
</html>
""")


@dataclass(frozen=True)
class Cell:
    """A cell of a table; the best of its column is shown in bold."""

    text: str
    best: bool = False


@dataclass
class Grid:
    """A table for a page; the first cell of a row is its name. The caption explains the columns in a line."""

    title: str
    columns: tuple[str, ...]  # empty: no head
    caption: str = ""
    rows: list[tuple[Cell, ...]] = field(default_factory=list)
    words: bool = False  # whether the cells are words, and not numbers

    def add(self, *cells: str | Cell) -> None:
        self.rows.append(tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in cells))


@cache
def static(name: str) -> str:
    """A file of the page's script or style."""
    return (files("fedstill.report") / "static" / name).read_text(encoding="utf-8")


def document(title: str, body: str) -> str:
    """The whole page. The policy allows the script and the style that are in it by their digests, and nothing else."""
    style, script = static("style.css"), static("chart.js")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return _PAGE.substitute(policy=policy, title=escape(title), style=style, body=body, script=script)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def table(grid: Grid, *, ident: str = "") -> str:
    """A table with its heads named as such, which on a narrow screen becomes a list of cards.

    The roles say again what the tags do: a browser forgets it of rows that are shown as cards.
    """
    kind = ("words" if grid.words else "numbers") + (" cards" if grid.columns else "")
    name = f' id="{ident}"' if ident else ""
    caption = f"<caption>{escape(grid.caption)}</caption>" if grid.caption else ""
    head = ""
    if grid.columns:
        cells = "".join(f'<th scope="col" role="columnheader">{escape(column)}</th>' for column in grid.columns)
        head = f'<thead role="rowgroup"><tr role="row">{cells}</tr></thead>'
    rows = "".join(_row(row, grid.columns) for row in grid.rows)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(grid.title)}">'
        f'<table{name} class="{kind}" role="table">{caption}{head}<tbody role="rowgroup">{rows}</tbody></table></div>'
    )


def _row(row: Sequence[Cell], columns: Sequence[str]) -> str:
    first, *others = row
    cells = [f'<th scope="row" role="rowheader">{escape(first.text)}</th>']
    for i, cell in enumerate(others, 1):
        label = f' data-label="{escape(columns[i])}"' if columns else ""
        shown = escape(cell.text)
        if _NUMBER.match(cell.text):
            shown = " ".join(f"<span>{escape(piece)}</span>" for piece in _BREAKS.split(cell.text))
        shown = f"<strong>{shown}</strong>" if cell.best else shown
        cells.append(f'<td role="cell"{label}>{shown}</td>')
    return f'<tr role="row">{"".join(cells)}</tr>'


def chart(kind: str, caption: str, data: Any) -> str:
    """A figure that the page's script draws from data."""
    return (
        f'<figure data-chart="{escape(kind)}"><figcaption>{escape(caption)}</figcaption>'
        f'<script type="application/json">{_json(data)}</script></figure>'
    )


def _json(data: Any) -> str:
    """JSON that nothing in it can end the element of."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def folded(summary: str, body: str) -> str:
    """What is shown when its summary is opened."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def text(name: str, content: str, *, css: str = "") -> str:
    """An element that holds nothing but text."""
    kind = f' class="{css}"' if css else ""
    return f"<{name}{kind}>{escape(content)}</{name}>"
