"""Print tables on a terminal, aligned plain text in a pipe, and stages and warnings on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from onnx_convgrad.base.progress import announce, listening
from onnx_convgrad.errors import shown


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under headings.

    Attributes:
        right: Columns that are aligned to the right (numbers).
        whole: Columns with names that are typed again: they are neither shortened nor wrapped, also if a line becomes longer
            than that of the terminal, which wraps it in a way that can be copied.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: frozenset[int] = field(default_factory=frozenset)
    title: str = ""
    whole: frozenset[int] = field(default_factory=frozenset)

    def least(self, column: int) -> int:
        """The width that a column of whole names needs; sentences in it may wrap."""
        cells = [row[column] for row in self.rows if len(row[column].split()) <= _WORDS]
        return max(map(len, cells), default=0) if column in self.whole else 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", [shown(column) for column in self.columns])
        object.__setattr__(self, "rows", [[shown(cell) for cell in row] for row in self.rows])
        object.__setattr__(self, "title", shown(self.title))

    def plain(self) -> str:
        """Two spaces between columns, no boxes, no wrapping."""
        lines = [list(self.columns), *map(list, self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        text = [
            "  ".join(
                cell.rjust(width) if i in self.right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([self.title, *text] if self.title else text)

    def fitted(self, width: int) -> Table:
        """The table for a terminal of so many columns: long names are shortened in the middle, since their ends tell most.

        The longest names lose most. Sentences will wrap, in columns that are not too narrow.
        """
        columns = range(len(self.columns))
        cells = [[row[i] for row in (self.columns, *self.rows)] for i in columns]
        wraps = {i for i in columns if any(len(cell.split()) > _WORDS for cell in cells[i])}
        widths = [max(min(max(map(len, cells[i])), _SENTENCE if i in wraps else width), self.least(i)) for i in columns]
        names = [i for i in columns if widths[i] > _SHORT and i not in wraps | self.right | self.whole]
        while sum(widths) + _BETWEEN * len(columns) > width and any(widths[i] > _LEAST for i in names):
            widths[max(names, key=lambda i: widths[i])] -= 1
        rows = [[shortened(cell, widths[i]) if i in names else cell for i, cell in enumerate(row)] for row in self.rows]
        return replace(self, rows=rows, title=" ".join(shortened(word, _LONGEST) for word in self.title.split(" ")))


_WORDS = 5
"""Most words of a cell that is not a sentence."""

_SENTENCE, _SHORT, _LEAST = 24, 25, 12
"""Columns of a terminal: that a sentence keeps, that a short name takes, that a long name keeps."""

_LONGEST = 40
"""Most characters of a name in a title."""

_BETWEEN = 3
"""Columns of a terminal around each column of a table."""


def shortened(text: str, width: int) -> str:
    """A text of at most so many characters: the middle of a longer one is left out."""
    if len(text) <= width:
        return text
    kept = max(width - len(_GAP), 2)
    return text[: kept // 2] + _GAP + text[len(text) - (kept - kept // 2) :]


_GAP = "..."


class Output:
    """Prints a command's results; `quiet` silences everything but errors, `json` everything but the JSON text."""

    def __init__(self, *, verbose: bool = False, quiet: bool = False, json: bool = False) -> None:
        self.verbose, self.json = verbose, json
        self.silent = quiet or json
        self.progress_on = not quiet and sys.stderr.isatty()

    def print_json(self, content: Mapping[str, object]) -> None:
        print(json.dumps(content, indent=2))

    def line(self, text: str = "") -> None:
        if not self.silent:
            print(shown(text))

    def table(self, table: Table, *, fold: int | None = None) -> None:
        """Print a table; unless `--verbose` is given, only the first `fold` rows, and how many more there are."""
        if self.silent:
            return
        rest = 0 if self.verbose or fold is None or len(table.rows) <= fold + 2 else len(table.rows) - fold
        if rest:
            self._print(replace(table, rows=table.rows[:fold]))
            self.line(f"... and {rest} more (-v shows all)")
        else:
            self._print(table)

    def _print(self, table: Table) -> None:
        if not sys.stdout.isatty():
            print(table.plain(), end="\n\n" if table.title else "\n")
            return
        from rich import box
        from rich.console import Console
        from rich.table import Table as Grid
        from rich.text import Text

        console = Console()
        table = table.fitted(console.width)
        if table.whole:
            least = [
                table.least(i) if i in table.whole else max(len(row[i]) for row in (table.columns, *table.rows))
                for i in range(len(table.columns))
            ]
            console = Console(width=max(console.width, sum(least) + _BETWEEN * len(least)))
        if table.title:
            console.print(Text(table.title, style="bold"))
        grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
        for i, column in enumerate(table.columns):
            justify: Literal["right", "left"] = "right" if i in table.right else "left"
            grid.add_column(column, justify=justify, overflow="fold", min_width=table.least(i) or None)
        for row in table.rows:
            grid.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
        console.print(grid)

    @contextlib.contextmanager
    def stages(self, first: str = "") -> Iterator[None]:
        """Announce `first`, and show a spinner with what is announced, on a terminal only."""
        if not self.progress_on:
            yield
            return
        from rich.console import Console
        from rich.markup import escape

        status = Console(stderr=True).status("starting")
        with status, listening(lambda line: status.update(escape(shown(line)))):
            if first:
                announce(first)
            yield


_STYLES = {"ok": "green", "FAIL": "bold red", "chosen": "green"}


@contextlib.contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Collect warnings, and print each as one line on stderr when the block ends."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        warnings.simplefilter("always", UserWarning)
        try:
            yield texts
        finally:
            kept = (w for w in caught if issubclass(w.category, (UserWarning, RuntimeWarning)))
            texts.extend(dict.fromkeys(" ".join(str(w.message).split()) for w in kept))
            for text in texts:
                tell(f"Warning: {text}")


def tell(text: str) -> None:
    """Print a line on stderr."""
    print(shown(text), file=sys.stderr)


def shape_text(shape: Sequence[object] | None) -> str:
    """Write a shape as `Nx3x224x224`; `?` stands for an unknown rank, `scalar` for rank 0."""
    if shape is None:
        return "?"
    return "x".join("?" if d is None else str(d) for d in shape) or "scalar"


def bytes_text(count: int) -> str:
    """Write a file size with a unit."""
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def ms_text(seconds: float) -> str:
    """Write a time in milliseconds with three significant digits."""
    return f"{1e3 * seconds:.3g} ms"
