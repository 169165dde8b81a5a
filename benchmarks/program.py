"""Options, saved measurements and Markdown tables of the programs that make the tables."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from onnx_convgrad.bench.timing import machine, machine_text
from onnx_convgrad.lowering.cost.calibration import cores

Row = dict[str, Any]
T = TypeVar("T")


def parser(name: str, doc: str, quick: str, *, timing: bool = True) -> argparse.ArgumentParser:
    """The options of every program; the first line of `doc` describes it, `quick` describes `--quick`.

    `timing` adds those of programs that measure several sides in turns; `--quick` then means at most three turns.
    """
    options = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc.splitlines()[0])
    options.add_argument("--quick", action="store_true", help=quick)
    options.add_argument("--json", type=Path, help="also write the measurements to a file")
    options.add_argument("--from", dest="saved", nargs="+", type=Path, help="print such files instead of measuring")
    options.set_defaults(threads=cores())
    if timing:
        options.add_argument("--threads", type=int, default=cores())
        options.add_argument("--repeat", type=int, default=7)
    return options


def carry_out(
    options: argparse.ArgumentParser,
    words: Sequence[str] | None,
    kind: str,
    measure: Callable[[argparse.Namespace], list[Row]],
    show: Callable[[Sequence[Row]], None],
    names: Sequence[str] = (),
) -> None:
    """Measure and save, or read saved measurements; print the machine and the table. `names`: valid positional arguments."""
    arguments = options.parse_args(words)
    unknown = [name for name in getattr(arguments, "names", ()) if name not in names]
    if unknown:
        options.error(f"{unknown[0]!r} is none of {', '.join(names)}")
    if arguments.saved:
        facts, rows = saved(arguments.saved, kind)
    else:
        if arguments.quick and "repeat" in arguments:
            arguments.repeat = min(3, arguments.repeat)
        facts, rows = machine(arguments.threads), measure(arguments)
        if arguments.json:
            told = [word for word in (sys.argv[1:] if words is None else words) if word != str(arguments.json)]
            command = " ".join([options.prog, *(word for word in told if word != "--json")])
            stored = {
                "table": kind,
                "command": command,
                "date": datetime.now(UTC).date().isoformat(),
                "machine": facts,
                "rows": rows,
            }
            arguments.json.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    print(machine_text(facts))
    show(rows)


def of_networks(
    words: Sequence[str] | None,
    kind: str,
    doc: str,
    usual: Sequence[str],
    names: Sequence[str],
    measure: Callable[[str, int, int], Row],
    show: Callable[[Sequence[Row]], None],
) -> None:
    """Carry out a program that measures networks, by default the `usual` ones; `measure` takes name, threads and repeats."""
    options = parser(kind, doc, "three repeats")
    options.add_argument("names", nargs="*", metavar="NETWORK", help=f"{', '.join(usual)} by default")

    def measured(given: argparse.Namespace) -> list[Row]:
        return [measure(name, given.threads, given.repeat) for name in announced(given.names or usual)]

    carry_out(options, words, kind, measured, show, names)


def announced(items: Iterable[T], name: Callable[[T], object] = str) -> Iterator[T]:
    """Each item; its name is printed to stderr before it is measured."""
    for item in items:
        print(f"  {name(item)}", file=sys.stderr, flush=True)
        yield item


def geometric_mean(ratios: Iterable[float]) -> float:
    """The geometric mean; NaN for no ratios."""
    ratios = list(ratios)
    return statistics.geometric_mean(ratios) if ratios else float("nan")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    rows = [list(row) for row in rows]
    widths = [max(3, *(len(row[i]) for row in [list(columns), *rows])) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        padded = [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join(("-" * (w + 1) + ":") if i else "-" * (w + 2) for i, w in enumerate(widths)) + "|"
    return "\n".join([line(columns), rule, *map(line, rows)])


def ms(seconds: float | None) -> str:
    """Milliseconds with three digits."""
    return "-" if seconds is None else f"{1e3 * seconds:.2f}" if seconds < 0.0995 else f"{1e3 * seconds:.0f}"


def saved(paths: Iterable[Path], kind: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The machine and the rows of one table, from files that `--json` wrote in several runs."""
    parts = [json.loads(path.read_text()) for path in paths]
    parts = [part for part in parts if part["table"] == kind]
    if not parts:
        raise SystemExit(f"No measurements of {kind!r} in these files.")
    return parts[0]["machine"], [row for part in parts for row in part["rows"]]
