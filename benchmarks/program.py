"""Options, saving and printing of the programs that make the tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import save, saved
from onnx_convgrad.bench.timing import machine, machine_text
from onnx_convgrad.lowering.cost.calibration import cores

Row = dict[str, Any]


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
        save(arguments.json, kind, facts, rows)
    print(machine_text(facts))
    show(rows)


def announced(names: Iterable[str]) -> Iterator[str]:
    """Each name, printed to stderr before it is measured."""
    for name in names:
        print(f"  {name}", file=sys.stderr, flush=True)
        yield name
