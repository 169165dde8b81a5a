"""Write all tables of the documentation from stored measurements: `python -m benchmarks.tables [--check]`.

The tables stand in pages of `docs` and in `README.md` between `<!-- measured: KIND FILE -->` and `<!-- end -->`. FILE is
in `benchmarks/results/`, and was written by `--json` of a program of this folder. So each number is stored once.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    adapters,
    build,
    distributed,
    functional,
    kernels,
    layers,
    loader,
    memory,
    native_bound,
    operators,
    per_sample,
    precision,
    quantization,
    scale,
    steps,
    trainer,
    web,
)
from benchmarks.gpu.rows import print_layers, print_steps
from benchmarks.program import Row, geometric_mean, table
from onnx_convgrad.bench.timing import machine_text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"(<!-- measured: (\w+) (\S+\.json) -->\n).*?(<!-- end -->)", re.DOTALL)

PRINTERS: Mapping[str, Callable[[Sequence[Row]], None]] = {
    "lowerings": layers.print_lowerings,
    "operators": operators.print_operators,
    "build": build.print_build,
    "per_sample": per_sample.print_table,
    "functional": functional.show,
    "trainer": trainer.print_trainer,
    "adapters": adapters.show,
    "loader": loader.show,
    "sums": scale.show,
    "distributed": distributed.show,
    "kernels": kernels.show,
    "native_bound": native_bound.show,
    "quantization": quantization.show,
    "precision": precision.print_precision,
    "web": web.print_web,
    "gpu": print_steps,
    "gpu_layers": print_layers,
}
"""Kind of a stored table -> the function that prints its rows as Markdown."""


def render(kind: str, stored: Mapping[str, Any]) -> str:
    """One stored table as Markdown: command, date and machine, then what the program printed.

    The kind `speed` is the short table of the README.
    """
    rows = stored["rows"]
    if kind == "speed":
        return f"{_speed(rows)}\n"
    if kind in _SHORT:
        text = _SHORT[kind](rows)
    else:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            PRINTERS[kind](rows)
        text = printed.getvalue().strip()
    return f"{text}\n\n`{stored['command']}`, {stored['date']}. {machine_text(stored['machine'])}\n"


def _ratios(rows: Sequence[Row], side: str) -> list[float]:
    """The time of a side over ours, for each network that it can run."""
    return [row["seconds"][side] / row["seconds"]["ours"] for row in rows if side in row["seconds"]]


def _steps(rows: Sequence[Row]) -> str:
    """Our time, the time of every other side over ours, and our memory over PyTorch's; means and extremes below."""
    sides = [side for side in steps.SIDES if side != "ours" and any(side in row["seconds"] for row in rows)]

    def cells(title: str, size: str, ours: str, some: Sequence[Row], pick: Callable[[list[float]], float]) -> list[str]:
        ratios = [_ratios(some, side) for side in sides]
        peaks = [row["peak"]["ours"] / row["peak"]["eager"] for row in some]
        memory = max(peaks) if pick is min else pick(peaks)
        return [title, size, ours, *(f"{pick(found):.2f}" if found else "-" for found in ratios), f"{memory:.2f}"]

    body = [
        cells(row["title"], "x".join(map(str, row["x"])), f"{1e3 * row['seconds']['ours']:.0f}", [row], geometric_mean)
        for row in rows
    ]
    body.append(cells("geometric mean", "", "", rows, geometric_mean))
    body.append(cells("worst", "", "", rows, min))
    columns = ["network", "input", "ours, ms", *(f"{steps.SIDES[side]} / ours" for side in sides), "memory"]
    return table(columns, body)


def _speed(rows: Sequence[Row]) -> str:
    """PyTorch's and torch.compile's time over ours, and our memory over PyTorch's, for five networks and all."""
    shown = [
        row for row in rows if row["network"] in ("resnet18", "mobilenet_v2", "convnext_tiny", "unet", "resnet18_3d")
    ]

    def cells(title: str, size: str, some: Sequence[Row]) -> list[str]:
        means = [geometric_mean(_ratios(some, side)) for side in ("eager", "compile")]
        memory = geometric_mean(row["peak"]["ours"] / row["peak"]["eager"] for row in some)
        return [title, size, *(f"{value:.2f}" for value in (*means, memory))]

    body = [cells(row["title"], "x".join(map(str, row["x"])), [row]) for row in shown]
    body.append(cells(f"geometric mean of {len(rows)} networks", "", rows))
    return table(["network", "input", "PyTorch / ours", "torch.compile / ours", "peak memory"], body)


def _layers(rows: Sequence[Row]) -> str:
    """Means and least ratios by class of layer."""
    columns = ["layers", "number", *(cell for kind in layers.KINDS for cell in (kind, "least"))]
    body = []
    for name in ["all", *dict.fromkeys(name for row in rows for name in row["classes"])]:
        members = [row for row in rows if name in ("all", *row["classes"])]
        ratios = [[layers.ratio(row, kind) for row in members] for kind in layers.KINDS]
        cells = (f"{value:.2f}" for found in ratios for value in (geometric_mean(found), min(found)))
        body.append([name, str(len(members)), *cells])
    return table(columns, body)


def _memory(rows: Sequence[Row]) -> str:
    """Peak memory and time within each budget."""
    columns = [
        "network",
        "PyTorch, MB",
        "ours, MB",
        *(f"at {share}: {what}" for share in memory.SHARES for what in ("MB", "time")),
    ]
    body = []
    for row in rows:
        cells = [row["title"], *(f"{row['peak'][side] / 1e6:.0f}" for side in ("eager", "ours"))]
        for share in memory.SHARES:
            found = row[str(share)]
            fits = "peak" in found
            cells.append(f"{found['peak'] / 1e6:.0f} of {found['wanted'] / 1e6:.0f}" if fits else "refused")
            cells.append(f"{found['seconds'] / row['seconds']['ours']:.2f}" if fits else "-")
        body.append(cells)
    return table(columns, body)


_SHORT: Mapping[str, Callable[[Sequence[Row]], str]] = {"steps": _steps, "layers": _layers, "memory": _memory}
"""Kind -> a table that is shorter than what the program prints."""


def updated(text: str) -> str:
    """The text of a page with its tables written anew."""

    def block(found: re.Match[str]) -> str:
        stored = json.loads((RESULTS / found[3]).read_text(encoding="utf-8"))
        return f"{found[1]}\n{render(found[2], stored)}\n{found[4]}"

    return BLOCK.sub(block, text)


def main(words: Sequence[str] | None = None) -> int:
    """Write the pages; with `--check` change nothing and return 1 if a table is out of date."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say which pages are out of date")
    check, status = parser.parse_args(words).check, 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := updated(text)) == text:
            continue
        if check:
            print(
                f"{page.name}: tables differ from benchmarks/results; run python -m benchmarks.tables", file=sys.stderr
            )
            status = 1
        else:
            page.write_text(new, encoding="utf-8")
            print(f"{page.name} written")
    return status


if __name__ == "__main__":
    sys.exit(main())
