"""Print tables on a terminal, aligned plain text in a pipe, and stages and warnings on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from onnx_convgrad.base.progress import Listener, announce, listening
from onnx_convgrad.errors import shown

_WORDS = 5
"""Most words of a cell that is not a sentence."""

_SENTENCE, _SHORT, _LEAST, _BETWEEN = 24, 25, 12, 3
"""Columns of a terminal: that a sentence keeps, that a short name takes, that a long name keeps, around each column."""

_LONGEST = 40
"""Most characters of a name in a title."""

_STYLES = {"ok": "green", "FAIL": "bold red", "chosen": "green"}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under headings.

    Attributes:
        right: Columns that are aligned to the right (numbers).
        whole: Columns with names that are typed again, which are never shortened: where a terminal is too narrow, long ones
            get lines of their own.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Collection[int] = ()
    title: str = ""
    whole: Collection[int] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", [shown(column) for column in self.columns])
        object.__setattr__(self, "rows", [[shown(cell) for cell in row] for row in self.rows])
        object.__setattr__(self, "title", shown(self.title))

    def plain(self) -> str:
        """Two spaces between columns, no boxes, no wrapping."""
        lines = [self._aligned(line, self.widths) for line in (self.columns, *self.rows)]
        return "\n".join([self.title, *lines] if self.title else lines)

    @property
    def widths(self) -> list[int]:
        """Characters of the longest cell of each column."""
        return [max(len(row[i]) for row in (self.columns, *self.rows)) for i in range(len(self.columns))]

    def _aligned(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        padded = enumerate(zip(cells, widths, strict=True))
        return "  ".join(c.rjust(n) if i in self.right else c.ljust(n) for i, (c, n) in padded).rstrip()

    def spread(self, width: int) -> list[str]:
        """The lines for a terminal of so many columns, where long names in `whole` columns stand on lines of their own.

        A name of the first column stands above its row, others below it. A terminal that is narrower than a name wraps it in
        a way that can be copied.
        """
        widths = self.widths
        while sum(widths) + 2 * (len(widths) - 1) > width and any(widths[i] > _SHORT for i in self.whole):
            widths[max(self.whole, key=lambda i: widths[i])] -= 1
        lines = [self._aligned(self.columns, widths)]
        for row in self.rows:
            long = [i for i in sorted(self.whole) if len(row[i]) > widths[i]]
            rest = self._aligned(["" if i in long else cell for i, cell in enumerate(row)], widths)
            above, below = [row[i] for i in long if not i], [f"    {row[i]}" for i in long if i]
            lines += [*above, *([rest] if rest else []), *below]
        return lines

    def fitted(self, width: int) -> Table:
        """The table for a terminal of so many columns: long names are shortened in the middle, since their ends tell most.

        The longest names lose most. Sentences will wrap, in columns that are not too narrow.
        """
        columns = range(len(self.columns))
        cells = [[row[i] for row in (self.columns, *self.rows)] for i in columns]
        wraps = {i for i in columns if any(len(cell.split()) > _WORDS for cell in cells[i])}
        widths = [min(max(map(len, cells[i])), _SENTENCE if i in wraps else width) for i in columns]
        names = [i for i in columns if widths[i] > _SHORT and i not in wraps.union(self.right)]
        while sum(widths) + _BETWEEN * len(columns) > width and any(widths[i] > _LEAST for i in names):
            widths[max(names, key=lambda i: widths[i])] -= 1
        rows = [[shortened(cell, widths[i]) if i in names else cell for i, cell in enumerate(row)] for row in self.rows]
        return replace(self, rows=rows, title=" ".join(shortened(word, _LONGEST) for word in self.title.split(" ")))


def shortened(text: str, width: int) -> str:
    """A text of at most so many characters: the middle of a longer one is left out."""
    if len(text) <= width:
        return text
    kept = max(width - 3, 2)
    return f"{text[: kept // 2]}...{text[len(text) - (kept - kept // 2) :]}"


class Output:
    """Prints a command's results; `quiet` silences everything but errors, `json` everything but the JSON text."""

    def __init__(self, *, verbose: bool = False, quiet: bool = False, json: bool = False) -> None:
        self.verbose, self.json = verbose, json
        self.silent = quiet or json
        self.quiet = quiet

    def print_json(self, content: Mapping[str, object]) -> None:
        if self.json:
            print(json.dumps(content, indent=2))

    def line(self, text: str = "") -> None:
        if not self.silent:
            print(shown(text))

    def table(self, table: Table, *, fold: int | None = None) -> None:
        """Print a table; unless `--verbose` is given, only the first `fold` rows, and how many more there are."""
        if self.silent:
            return
        rest = 0 if self.verbose or fold is None or len(table.rows) <= fold + 2 else len(table.rows) - fold
        self._print(replace(table, rows=table.rows[:fold]) if rest else table)
        if rest:
            self.line(f"... and {rest} more (-v shows all)")

    def _print(self, table: Table) -> None:
        if not sys.stdout.isatty():
            print(table.plain(), end="\n\n" if table.title else "\n")
            return
        from rich import box
        from rich.console import Console
        from rich.table import Table as Grid
        from rich.text import Text

        console = Console()
        if table.whole and sum(table.widths) + _BETWEEN * len(table.columns) > console.width:
            head, *lines = table.spread(console.width)
            console.print(Text(head, style="bold"), soft_wrap=True)
            print("\n".join(lines))
            return
        table = table.fitted(console.width)
        if table.title:
            console.print(Text(table.title, style="bold"))
        grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
        for i, column in enumerate(table.columns):
            justify: Literal["right", "left"] = "right" if i in table.right else "left"
            grid.add_column(column, justify=justify, overflow="fold")
        for row in table.rows:
            grid.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
        console.print(grid)

    @contextlib.contextmanager
    def stages(self, first: str = "") -> Iterator[None]:
        """Announce `first`, and show what is announced on stderr: a spinner on a terminal, a line now and then elsewhere."""
        with contextlib.ExitStack() as stack:
            if not self.quiet:
                listener = stack.enter_context(_spinner() if sys.stderr.isatty() else _lines())
                stack.enter_context(listening(listener))
                if first:
                    announce(first)
            yield


@contextlib.contextmanager
def _spinner() -> Iterator[Listener]:
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status("starting") as status:
        yield lambda line: status.update(escape(shown(line)))


EVERY = 10.0
"""Seconds between lines of progress in a pipe; what is done sooner has none."""


@contextlib.contextmanager
def _lines() -> Iterator[Listener]:
    """Print the last announcement with the seconds since the start, again and again, in a thread."""
    import time
    from threading import Event, Thread

    begun, last, ended = time.monotonic(), ["starting"], Event()

    def tell_progress() -> None:
        while not ended.wait(EVERY):
            tell(f"... {time.monotonic() - begun:.0f} s: {last[0]}")

    thread = Thread(target=tell_progress, daemon=True)
    thread.start()
    try:
        yield lambda line: last.__setitem__(0, line)
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def recorded_warnings() -> Iterator[None]:
    """Collect warnings, and print each as one line on stderr when the block ends."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        finally:
            kept = (w for w in caught if issubclass(w.category, (UserWarning, RuntimeWarning)))
            for text in dict.fromkeys(" ".join(str(w.message).split()) for w in kept):
                tell(f"Warning: {text}")


def tell(text: str) -> None:
    """Print a line on stderr."""
    print(shown(text), file=sys.stderr)


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Rows as CSV."""
    import csv
    import io

    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def shape_text(shape: Sequence[object] | None) -> str:
    """Write a shape as `Nx3x224x224`; `?` stands for an unknown rank, `scalar` for rank 0."""
    if shape is None:
        return "?"
    return "x".join("?" if d is None else str(d) for d in shape) or "scalar"


def bytes_text(count: int) -> str:
    """Write a file size with a unit."""
    size, prefix = _prefixed(count)
    return f"{size:.1f} {prefix}B" if prefix else f"{size:.0f} B"


def count_text(count: int) -> str:
    """Write a number of operations with a prefix."""
    size, prefix = _prefixed(count)
    return f"{size:.3g} {prefix}" if prefix else f"{size:.0f}"


def _prefixed(count: int) -> tuple[float, str]:
    """A number below 1000, unless it is more than that many tera, and the prefix of its unit."""
    size, prefixes = float(count), ["", "k", "M", "G", "T"]
    while size >= 1000 and len(prefixes) > 1:
        size /= 1000
        prefixes.pop(0)
    return size, prefixes[0]


def ms_text(seconds: float) -> str:
    """Write a time in milliseconds with three significant digits."""
    return f"{1e3 * seconds:.3g} ms"
