"""What the programs that make the tables have in common: their options, saving, and printing what was saved."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import save, saved
from onnx_convgrad.bench.timing import machine, machine_text
from onnx_convgrad.lowering.cost.calibration import cores

Row = dict[str, Any]


def parser(name: str, doc: str, quick: str) -> argparse.ArgumentParser:
    """The options of every program; `doc` begins with what it does, `quick` says what `--quick` does."""
    found = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc.splitlines()[0])
    found.add_argument("--quick", action="store_true", help=quick)
    found.add_argument("--json", type=Path, help="also write the measurements to a file")
    found.add_argument("--from", dest="saved", nargs="+", type=Path, help="print such files instead of measuring")
    found.set_defaults(threads=cores())
    return found


def timing_options(found: argparse.ArgumentParser) -> None:
    """Those of programs that take turns on equal threads; `--quick` means three turns."""
    found.add_argument("--threads", type=int, default=cores())
    found.add_argument("--repeat", type=int, default=7)


def known(found: argparse.ArgumentParser, names: Sequence[str], options: Sequence[str]) -> None:
    """End with a usage error where a name is none of the options."""
    unknown = [name for name in names if name not in options]
    if unknown:
        found.error(f"{unknown[0]!r} is none of {', '.join(options)}")


def carry_out(
    arguments: argparse.Namespace, kind: str, measure: Callable[[], list[Row]], show: Callable[[Sequence[Row]], None]
) -> None:
    """Measure and save, or read what was saved; then print the machine and the table."""
    if arguments.saved:
        facts, rows = saved(arguments.saved, kind)
    else:
        if arguments.quick and "repeat" in arguments:
            arguments.repeat = min(3, arguments.repeat)
        facts, rows = machine(arguments.threads), measure()
        save(arguments.json, kind, facts, rows)
    print(machine_text(facts))
    show(rows)
