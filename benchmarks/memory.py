"""Table (h): time of training steps within memory budgets.

    python -m benchmarks.memory                    # all networks
    python -m benchmarks.memory resnet50 --quick

The budgets are shares of PyTorch's peak memory for the same step. The peak of a process includes Python and the runtime;
what they take before the first step, besides inputs and buffers of weights, is measured and kept free. At a share of
0.2 only the last third of the parameters is trained.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.program import Row, announced, carry_out, geometric_mean, parser, table
from benchmarks.steps import commands, measure, prepare
from onnx_convgrad.errors import ArgumentError

NETWORKS = ("resnet50", "mobilenet_v2", "unet", "densenet121")
SHARES = (0.4, 0.33, 0.2)
LAST_THIRD = 0.2
"""The share at which only the last third of the parameters is trained."""


def measured(arguments: argparse.Namespace) -> list[Row]:
    rows = []
    for name in announced(arguments.names or NETWORKS):
        row = _step(name, arguments, ["eager", "ours"])
        spare = row["loaded"]["ours"] - row["held"]
        for share in SHARES:
            wanted = int(share * row["peak"]["eager"])
            options: dict[str, Any] = {"memory_budget": wanted - spare}
            if share == LAST_THIRD:
                options["wrt"] = lambda names: names[len(names) * 2 // 3 :]
            try:
                found = _step(name, arguments, ["ours"], **options)
            except ArgumentError as refusal:
                row[str(share)] = {"wanted": wanted, "refusal": refusal.message}
                continue
            row[str(share)] = {
                "wanted": wanted, "peak": found["peak"]["ours"], "seconds": found["seconds"]["ours"], "build": found["build"]
            }  # fmt: skip
        rows.append(row)
    return rows


def _step(name: str, arguments: argparse.Namespace, sides: Sequence[str], **options: Any) -> Row:
    with TemporaryDirectory() as folder:
        batch = 2 if arguments.quick else 0
        facts = prepare(name, Path(folder), batch, arguments.size, ort=None, **options)
        return measure(facts, commands(sides, Path(folder), arguments.threads, {}), arguments.repeat)


def print_memory(rows: Sequence[Row]) -> None:
    columns = ["network", "PyTorch MB", "ours MB", "ours ms"]
    columns += [f"{share} of PyTorch's: {what}" for share in SHARES for what in ("MB", "time")]
    body = []
    for row in rows:
        cells = [row["title"], f"{row['peak']['eager'] / 1e6:.0f}", f"{row['peak']['ours'] / 1e6:.0f}"]
        cells.append(f"{1e3 * row['seconds']['ours']:.0f}")
        for share in SHARES:
            found = row[str(share)]
            fits = "peak" in found
            cells.append(f"{found['peak'] / 1e6:.0f} of {found['wanted'] / 1e6:.0f}" if fits else "refused")
            cells.append(f"{found['seconds'] / row['seconds']['ours']:.2f}" if fits else "-")
        body.append(cells)
    print(f"\n{table(columns, body)}\n")
    for share in SHARES:
        found = [row[str(share)] for row in rows]
        ratios = [f["seconds"] / row["seconds"]["ours"] for f, row in zip(found, rows, strict=True) if "seconds" in f]
        if ratios:
            over = max(f["peak"] / f["wanted"] for f in found if "peak" in f)
            print(
                f"At {share}: geometric mean of time {geometric_mean(ratios):.2f}; peak at most {over:.2f} of the budget."
            )
    for row in rows:
        for share in SHARES:
            if "refusal" in row[str(share)]:
                print(f"{row['title']} at {share}: {row[str(share)]['refusal']}")


def main(words: Sequence[str] | None = None) -> None:
    options = parser("memory", __doc__, "a batch of 2, three repeats")
    options.add_argument("names", nargs="*", metavar="NETWORK", help=f"of {', '.join(NETWORKS)}; all by default")
    options.add_argument("--size", type=int, default=0, help="height and width of images")
    carry_out(options, words, "memory", measured, print_memory, list(NETWORKS))


if __name__ == "__main__":
    main()
