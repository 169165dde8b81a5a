"""Table (d): how a training step grows with batch, image size, depth and threads, beside PyTorch's.

python -m benchmarks.scaling                   # all four
python -m benchmarks.scaling batch threads     # these
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.program import Row, carry_out, known, parser, timing_options
from benchmarks.steps import commands, measure, prepare
from benchmarks.tables import table

SIDES = ("eager", "ours")
AXES = ("batch", "image size", "depth", "threads")


def points(axis: str, threads: int, *, quick: bool) -> Iterator[tuple[str, str, int, int, int]]:
    """What is varied, and its name: label, network, batch, size, threads."""
    if axis == "batch":
        for batch in (1, 2, 4, 8, 16, 32)[: 3 if quick else None]:
            yield str(batch), "resnet18", batch, 0, threads
    elif axis == "image size":
        for size in (64, 96, 128, 192, 256, 384)[: 2 if quick else None]:
            yield f"{size}x{size}", "resnet18", 4, size, threads
    elif axis == "depth":
        for depth in (18, 34, 50, 101)[: 2 if quick else None]:
            yield f"ResNet-{depth}", f"resnet{depth}", 4, 128, threads
    else:
        for count in range(1, threads + 1):
            yield str(count), "resnet18", 8, 128, count


def measured(axes: Sequence[str], threads: int, repeats: int, *, quick: bool) -> list[Row]:
    rows = []
    for axis in axes:
        for label, network, batch, size, count in points(axis, threads, quick=quick):
            print(f"  {axis} {label}", file=sys.stderr, flush=True)
            with TemporaryDirectory() as folder:
                facts = prepare(network, Path(folder), batch, size, ort=None, lowering="auto")
                row = measure(facts, commands(SIDES, Path(folder), count, None), repeats)
            rows.append({"axis": axis, "label": label, "threads": count, **row})
    return rows


def print_scaling(rows: Sequence[Row]) -> None:
    for axis in dict.fromkeys(row["axis"] for row in rows):
        body = []
        for row in (row for row in rows if row["axis"] == axis):
            eager, ours = (row["seconds"][side] for side in SIDES)
            peaks = [f"{row['peak'][side] / 1e6:.0f}" for side in SIDES]
            cells = [f"{1e3 * eager:.0f}", f"{1e3 * ours:.0f}", f"{eager / ours:.2f}", *peaks]
            body.append([row["label"], "x".join(map(str, row["x"])), str(row["threads"]), *cells])
        columns = [axis, "input", "threads", "PyTorch ms", "ours ms", "ratio", "PyTorch MB", "ours MB"]
        print(f"\n{table(columns, body)}")


def main(words: Sequence[str] | None = None) -> None:
    options = parser("scaling", __doc__, "the smaller ones, three repeats")
    options.add_argument("axes", nargs="*", help=f"of {', '.join(AXES)}; all by default")
    timing_options(options)
    arguments = options.parse_args(words)
    known(options, arguments.axes, list(AXES))

    def measure() -> list[Row]:
        return measured(arguments.axes or AXES, arguments.threads, arguments.repeat, quick=arguments.quick)

    carry_out(arguments, "scaling", measure, print_scaling)


if __name__ == "__main__":
    main()
