"""Runs side by side: one table of what evaluations found, for a terminal, in Markdown or in LaTeX."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from cmsf.utils.text import escape_unprintable, one_line, shorten

_LATEX = {
    "\\": r"\textbackslash{}",
    "±": r"$\pm$",
    "–": "--",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
} | {letter: f"\\{letter}" for letter in "%&#_{}$"}
_MARKDOWN = {"<": "&lt;", ">": "&gt;", "&": "&amp;"} | {letter: f"\\{letter}" for letter in "\\|`[]$"}
_LONGEST_NAME = 100


@dataclass
class Comparison:
    """A row a run or reference, a column a figure: its value and half of its 95 % interval."""

    title: str = ""
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, name: str, measures: dict[str, Any]) -> None:
        self.rows.setdefault(name, {}).update(measures)

    def show(self, form: str) -> None:
        if form == "markdown":
            print(self.markdown())
        elif form == "latex":
            print(self.latex())
        else:
            self._on_terminal()

    def markdown(self) -> str:
        header, *rows = self._cells()
        rule = ["---", *["---:" for _ in header[1:]]]
        lines = [list(map(_in_markdown, header)), rule, *(list(map(_in_markdown, row)) for row in rows)]
        return "\n".join([_in_markdown(one_line(self.title)), "", *("| " + " | ".join(line) + " |" for line in lines)])

    def latex(self) -> str:
        header, *rows = ([_in_latex(cell) for cell in line] for line in self._cells())
        lines = [" & ".join(line) + r" \\" for line in (header, *rows)]
        columns = "l" + "r" * (len(header) - 1)
        title = f"% {one_line(self.title)}; needs \\usepackage{{booktabs}}"
        body = [r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
        return "\n".join([title, rf"\begin{{tabular}}{{{columns}}}", *body, r"\end{tabular}"])

    def _on_terminal(self) -> None:
        """Prints a row a run; or, where those would be too wide, a row a figure."""
        console = Console(highlight=False)
        cells = self._cells()
        table = self._table(cells)
        if Measurement.get(console, console.options.update(width=10_000), table).maximum > console.width:
            table = self._table([list(column) for column in zip(*cells, strict=True)])
        console.print(table)

    def _table(self, cells: list[list[str]]) -> Table:
        header, *rows = cells
        table = Table(title=Text(one_line(self.title)), title_justify="left")
        for number, column in enumerate(header):  # as text, for a name may look like markup
            table.add_column(Text(column), justify="right" if number else "left")
        for row in rows:
            table.add_row(*map(Text, row))
        return table

    def caption(self, judged_on: str) -> None:
        """Sets the title: what is measured, on what."""
        starred = any(self._mark(column) for row in self.rows.values() for column in row)
        self.title = (
            f"accuracy on {judged_on}, %, ± half of its 95 % interval{'; *: mean per class' if starred else ''}"
        )

    def _mark(self, column: str) -> str:
        from cmsf.evaluation.metrics import MEAN_PER_CLASS

        measured = (row[column] for row in self.rows.values() if column in row)
        return "*" if any(measures["quoted"] == MEAN_PER_CLASS for measures in measured) else ""

    def _cells(self) -> list[list[str]]:
        columns = list(dict.fromkeys(column for measures in self.rows.values() for column in measures))
        header = ["", *(column.replace("-nn", "-NN") + self._mark(column) for column in columns)]
        return [
            [_name(column) for column in header],
            *(
                [_name(name), *(_cell(measures.get(column)) for column in columns)]
                for name, measures in self.rows.items()
            ),
        ]


def _name(name: str) -> str:
    return shorten(escape_unprintable(name), _LONGEST_NAME)


def _cell(measures: dict[str, Any] | None) -> str:
    if measures is None:
        return "–"
    quoted = measures[measures["quoted"]]
    return f"{quoted['value']:.2f} ± {(quoted['high'] - quoted['low']) / 2:.1f}"


def _in_markdown(text: str) -> str:
    return "".join(_MARKDOWN.get(letter, letter) for letter in text)


def _in_latex(text: str) -> str:
    guard = "{}" if text.startswith(("[", "*")) else ""  # which would belong to the \\\\ of the line above
    return guard + "".join(_LATEX.get(letter, letter) for letter in text)
