"""Table (h): time of training steps within memory budgets.

    python -m benchmarks.memory                    # all networks
    python -m benchmarks.memory resnet50 --quick

The budgets are shares of PyTorch's peak memory for the same step; steps with and without one run in turns. The peak of a
process includes Python and the runtime; what they take before the first step, besides inputs and buffers of weights, is
measured and kept free. At a share of 0.2 only the last third of the parameters is trained.
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
        with TemporaryDirectory() as folder:
            rows.append(_network(name, arguments, Path(folder)))
    return rows


def _network(name: str, arguments: argparse.Namespace, folder: Path) -> Row:
    """Peaks of both sides; then the steps without a budget and within each, in turns."""
    row = _prepared(name, arguments, folder / "whole")
    measure(row, commands(["eager", "ours"], folder / "whole", arguments.threads, {}), arguments.repeat)
    spare = row["loaded"]["ours"] - row["held"]
    folders = {"ours": folder / "whole"}
    for share in map(str, SHARES):
        wanted = int(float(share) * row["peak"]["eager"])
        options: dict[str, Any] = {"memory": wanted - spare}
        if float(share) == LAST_THIRD:
            options["wrt"] = lambda names: names[len(names) * 2 // 3 :]
        row[share] = {"wanted": wanted}
        try:
            row[share]["build"] = _prepared(name, arguments, folder / share, **options)["build"]
            folders[share] = folder / share
        except ArgumentError as refusal:
            row[share]["refusal"] = refusal.message
    sides = {side: commands(["ours"], place, arguments.threads, {})["ours"] for side, place in folders.items()}
    turns = measure({"missing": {}}, sides, arguments.repeat)
    row["seconds"]["ours"] = turns["seconds"].pop("ours")
    for share, seconds in turns["seconds"].items():
        row[share] |= {"peak": turns["peak"][share], "seconds": seconds}
    return row


def _prepared(name: str, arguments: argparse.Namespace, folder: Path, **options: Any) -> Row:
    folder.mkdir()
    return prepare(name, folder, 2 if arguments.quick else 0, arguments.size, ort=None, **options)


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
