"""Tables to be read: on a terminal, in a notebook, in Markdown, LaTeX and CSV; and their numbers as a data frame."""

from __future__ import annotations

import csv
import importlib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, get_args

import numpy as np

from fedstill.core.choices import Format
from fedstill.core.errors import SettingError

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "→": r"$\to$", "–": "--", "·": r"$\cdot$",
}  # fmt: skip


@dataclass(repr=False)
class Table:
    """A table; the first column names the rows. A row may be shorter than the columns.

    Examples:
        >>> rows = [("fedavg", "81.20 %"), ("fedprox", "82.00 %")]
        >>> table = Table("Results", ("", "accuracy"), rows=rows, best={(1, 1)})
        >>> print(table.to_markdown())
        |  | accuracy |
        |---|---:|
        | fedavg | 81.20 % |
        | fedprox | **82.00 %** |
        <BLANKLINE>
    """

    title: str
    columns: tuple[str, ...]
    caption: str | None = None
    rows: list[tuple[str, ...]] = field(default_factory=list)
    values: list[dict[str, Any]] = field(default_factory=list)  # the same as data, one dict a row
    words: bool = False  # whether the columns hold words, not numbers
    best: set[tuple[int, int]] = field(default_factory=set)  # cells, by row and column, that stand out

    def add(self, *cells: str) -> None:
        """Add a row."""
        self.rows.append(cells)

    def frame(self) -> Any:
        """The numbers behind the table: a pandas DataFrame, or without pandas a dict of NumPy arrays."""
        return frame(self.values or [dict(zip(self.columns, self._padded(row), strict=True)) for row in self.rows])

    def to_markdown(self) -> str:
        """The table in Markdown, the best of each column in bold."""
        head = [
            f"| {' | '.join(map(_markdown, self.columns))} |",
            "|---" + ("|---" if self.words else "|---:") * (len(self.columns) - 1) + "|",
        ]
        lines = [f"| {' | '.join(row)} |" for row in self._cells(_markdown, "**{}**")]
        return "\n".join([*head, *lines]) + "\n"

    def to_latex(self) -> str:
        r"""The table in LaTeX, with the rules of booktabs (\usepackage{booktabs}), the best of each column in bold."""
        head = " & ".join(map(_latex, self.columns))
        lines = [" & ".join(row) + r" \\" for row in self._cells(_latex, r"\textbf{{{}}}")]
        columns = "l" + ("l" if self.words else "r") * (len(self.columns) - 1)
        parts = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", rf"{head} \\", r"\midrule", *lines, r"\bottomrule"]
        return "\n".join([*parts, r"\end{tabular}"]) + "\n"

    def to_csv(self) -> str:
        """The numbers behind the table as CSV."""
        text = io.StringIO(newline="")
        if self.values:
            table = csv.DictWriter(text, list(dict.fromkeys(name for row in self.values for name in row)))
            table.writeheader()
            table.writerows(self.values)
        else:
            csv.writer(text).writerows([self.columns, *map(self._padded, self.rows)])
        return text.getvalue()

    def formatted(self, kind: Format) -> str:
        """The table as text in a format other than the terminal's."""
        if kind not in get_args(Format):
            raise SettingError(f"format = {kind!r}: {', '.join(get_args(Format))}")
        return {"markdown": self.to_markdown, "latex": self.to_latex, "csv": self.to_csv}[kind]()

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(column)}</th>" for column in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in self._cells(escape, "<b>{}</b>")
        )
        caption = f"<caption>{escape(self.title)}</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return f"{self.title}\n\n{self.to_markdown()}" + (f"\n{self.caption}\n" if self.caption else "")

    def _padded(self, row: Sequence[str]) -> tuple[str, ...]:
        return (*row, *[""] * (len(self.columns) - len(row)))

    def _cells(self, quoted: Any, bold: str) -> Iterable[list[str]]:
        for i, row in enumerate(self.rows):
            yield [
                bold.format(quoted(cell)) if (i, j) in self.best and cell else quoted(cell)
                for j, cell in enumerate(self._padded(row))
            ]


def frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Rows as a pandas DataFrame, or without pandas as a dict of NumPy arrays; what a row lacks is NaN or None."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return from_columns({name: column([row.get(name) for row in rows]) for name in names})


def from_columns(columns: Mapping[str, Any]) -> Any:
    """The same of columns."""
    try:
        return importlib.import_module("pandas").DataFrame(columns)
    except ImportError:
        return dict(columns)


def column(values: Sequence[Any]) -> Any:
    """Values as an array: of numbers if they are, NaN where one is missing."""
    if any(isinstance(value, str | list | dict | tuple) for value in values):
        found = np.empty(len(values), dtype=object)
        found[:] = values
        return found
    if any(value is None for value in values):
        return np.array([np.nan if value is None else value for value in values], dtype=float)
    return np.array(values)


def _markdown(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", "<br>")


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text).replace("\n", ", ")
