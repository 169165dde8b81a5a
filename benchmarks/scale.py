"""Steps on hundreds of ranks, simulated from measured sums: `python -m benchmarks.scale`.

python -m benchmarks.scale --json benchmarks/results/sums.json            # measure sums of two ranks on this machine
python -m benchmarks.scale --from benchmarks/results/sums.json            # the table
python -m benchmarks.scale --from benchmarks/results/sums.json --plot docs/images/many_ranks.png

A sum of S bytes over N ranks moves 2 (N - 1) / N S bytes through each rank (Patarasuk and Yuan 2009), at the speed of the
link and then at that of the memory copies and additions, which is measured. Each piece of a sum takes 2 log2(N) messages
(Thakur et al. 2005, as in MPICH) or 2 (N - 1) (a ring, as in gloo), and one call, whose time is measured too.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.program import Row, carry_out, ms, parser, table

PARAMETERS = {"ResNet-50": 25.6e6, "100 M parameters": 100e6}
LINKS = {"10 Gbit/s": 10e9 / 8, "100 Gbit/s": 100e9 / 8}
COMPUTING = (0.2, 1.4)
"""Seconds of gradients and update: an accelerator, and ResNet-50 on 8 images by two cores (`docs/performance.md`)."""

RANKS = (2, 8, 64, 512)
LATENCY = 2e-5
"""Seconds of a message besides its bytes, on Ethernet."""

MACHINE = 8
"""Ranks of a machine, whose sum is made in its memory first."""

BACKWARD = 2 / 3
"""The share of the gradients in the backward pass, in which buckets get ready one after another."""

SIZES = (1024, 2**18, 11_700_000, 25_600_000)


# -- the simulation ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Engine:
    """Measured numbers of an engine: seconds of a call, seconds per byte; bytes of a piece, and whether it is a ring."""

    call: float
    per_byte: float
    piece: float
    ring: bool

    def sum(self, ranks: int, size: float, speed: float = math.inf) -> float:
        """Seconds to add up so many bytes over all ranks."""
        if ranks < 2:
            return 0.0
        pieces = max(math.ceil(size / self.piece), 1)
        messages = 2 * (ranks - 1) if self.ring else 2 * math.ceil(math.log2(ranks))
        moved = 2 * (ranks - 1) / ranks * size
        latency = LATENCY if speed < math.inf else 0.0
        return moved * (1 / speed + self.per_byte) + pieces * (self.call + messages * latency)

    def nested(self, ranks: int, size: float, speed: float) -> float:
        """Seconds of a sum by the ranks of each machine first, and then by one rank of each machine."""
        inside = min(ranks, MACHINE)
        return self.sum(inside, size) + self.sum(ranks // inside, size, speed)

    def overlapped(self, ranks: int, size: float, speed: float, computing: float) -> float:
        """Seconds of a step whose buckets are added up, one after another, while the backward pass goes on."""
        count = max(round(size / 4e6), 1)
        one, free = replace(self, piece=math.inf).sum(ranks, size / count, speed), 0.0
        for number in range(1, count + 1):
            ready = computing * (1 - BACKWARD * (1 - number / count))
            free = max(free, ready) + one
        return free


def engines(rows: Sequence[Row]) -> dict[str, Engine]:
    """The engines of stored measurements."""
    found = {}
    for name in dict.fromkeys(row["engine"] for row in rows):
        seconds = {row["bytes"]: row["seconds"] for row in rows if row["engine"] == name}
        least, most = min(seconds), max(seconds)
        piece = next(row["piece"] for row in rows if row["engine"] == name)
        pieces = math.ceil(most / piece) if piece else 1
        per_byte = (seconds[most] - pieces * seconds[least]) / (most - pieces * least)
        call = seconds[least] - per_byte * least
        found[name] = Engine(call, per_byte, piece or math.inf, ring=name == "torch")
    return found


def plan(engine: Engine) -> Iterator[list[str]]:
    """Rows: the sum, and the share of a step that computes: now, with overlap, by machines, with four batches per sum."""
    for model, count in PARAMETERS.items():
        for link, speed in LINKS.items():
            for ranks in RANKS:
                total = engine.sum(ranks, 4 * count, speed)
                nested = engine.nested(ranks, 4 * count, speed)
                cells = [model, link, str(ranks), ms(total), ms(nested) if ranks > MACHINE else "-"]
                for computing in COMPUTING:
                    hidden = engine.overlapped(ranks, 4 * count, speed, computing)
                    steps = computing + total, hidden, computing + total / 4
                    cells += [f"{computing / step:.0%}" for step in steps]
                yield cells


def show(rows: Sequence[Row]) -> None:
    columns = ["gradients of", "link", "ranks", "sum ms", "by machines"]
    columns += [f"{c:g} s{extra}" for c in COMPUTING for extra in ("", " overlap", " x 4")]
    for name, engine in engines(rows).items():
        print(f"\n{name}: {1e6 * engine.call:.0f} us a call, {1e-9 / engine.per_byte:.1f} GB/s on two ranks\n")
        print(table(columns, list(plan(engine))))


def draw(rows: Sequence[Row], path: Path) -> None:
    """Step time against ranks for each model and link."""
    from onnx_convgrad.cli.figures import CONTRAST, FAINT, OURS, picture

    engine, computing = engines(rows)["mpi"], COMPUTING[0]
    ranks = [2**i for i in range(1, 11)]
    about = f"Gradients and update take {1e3 * computing:.0f} ms, the thin line; MPI, float32."
    details = "python -m benchmarks.scale, simulated from measured sums"
    with picture(path, (9, 6.2), "A step on many ranks", about, details, dpi=130) as figure:
        axes = figure.subplots(2, 2, sharex=True, sharey="row")
        places = [(model, link) for model in PARAMETERS for link in LINKS]
        for axis, (model, link) in zip(axes.flat, places, strict=True):
            size, speed = 4 * PARAMETERS[model], LINKS[link]
            lines = {
                "one sum after the gradients": (OURS, "-", [computing + engine.sum(n, size, speed) for n in ranks]),
                "if overlapped with the backward pass": (
                    CONTRAST, "-", [engine.overlapped(n, size, speed, computing) for n in ranks]
                ),
                "machines of 8 ranks first": (OURS, "--", [computing + engine.nested(n, size, speed) for n in ranks]),
                "four batches for each sum": (FAINT, "--", [computing + engine.sum(n, size, speed) / 4 for n in ranks]),
            }  # fmt: skip
            for label, (color, style, seconds) in lines.items():
                axis.plot(ranks, [1e3 * s for s in seconds], style, color=color, lw=1.8, label=label)
            axis.axhline(1e3 * computing, color=FAINT, lw=0.8)
            axis.set_xscale("log", base=2)
            axis.set_xticks(ranks[::3], [str(n) for n in ranks[::3]])
            axis.set_ylim(bottom=0)
            axis.set_title(f"{model}, {link}")
            axis.grid(axis="y")
        for axis in axes[:, 0]:
            axis.set_ylabel("ms per batch")
        for axis in axes[1]:
            axis.set_xlabel("ranks")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=2)
        figure.subplots_adjust(left=0.09, right=0.98, top=0.79, bottom=0.19, hspace=0.3, wspace=0.08)


# -- measuring ---------------------------------------------------------------------------------------------------------


def work(folder: Path) -> None:
    """Measure sums on this rank; rank 0 writes the best times."""
    import time

    import numpy as np

    from onnx_convgrad.distributed import connect
    from onnx_convgrad.distributed.ranks import Ranks

    communicator = connect("auto")
    ranks, rows = Ranks(communicator), []
    for size in SIZES:
        array, best = np.zeros(size, np.float32), math.inf
        for _ in range(200 if size < 10**6 else 12):
            ranks.meet()
            start = time.perf_counter()
            ranks.all_reduce(array)
            best = min(best, time.perf_counter() - start)
        rows.append({"bytes": array.nbytes, "seconds": best, "piece": getattr(communicator, "bucket", None)})
    if ranks.leader:
        (folder / "sums.json").write_text(json.dumps(rows))


def measured(_: argparse.Namespace) -> list[Row]:
    """Sums of two ranks on this machine: through its memory, the least that a sum can take."""
    import subprocess

    from tests.support.launching import ENGINES, command, environment

    rows: list[Mapping[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        for engine in ENGINES:
            words = command(engine, 2, "-m", "benchmarks.scale", "--work", name)
            subprocess.run(words, check=True, env=environment(), timeout=600)
            found = json.loads((Path(name) / "sums.json").read_text())
            rows += [{"engine": engine, "ranks": 2, **row} for row in found]
    return [dict(row) for row in rows]


def main(words: Sequence[str] | None = None) -> None:
    options = parser("scale", __doc__, "without effect", timing=False)
    options.add_argument("--plot", type=Path, help="draw step time against ranks")
    options.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = options.parse_args(words)
    if arguments.work:
        work(arguments.work)
        return

    def shown(rows: Sequence[Row]) -> None:
        show(rows)
        if arguments.plot:
            draw(rows, arguments.plot)

    carry_out(options, words, "sums", measured, shown)


if __name__ == "__main__":
    main()
