"""Steps on several ranks: gradients, their sum over all ranks, and the update, against one process.

python -m benchmarks.distributed                        # ResNet-18, 32 images of 112 pixels, on mpiexec and torchrun
python -m benchmarks.distributed --ranks 2 4 --batch 64 --size 64
python -m benchmarks.distributed --link 1 10            # besides, as if a link of so many Gbit/s lay between the ranks
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.program import Row, carry_out, parser, table

# -- one rank ----------------------------------------------------------------------------------------------------------


def work(folder: Path, repeat: int) -> None:
    """Time the parts of a step on this rank; rank 0 writes them."""
    import onnx_convgrad as og
    from onnx_convgrad.distributed import connect

    about = json.loads((folder / "about.json").read_text())
    communicator: Any = connect("auto")
    if communicator is not None:
        communicator.overlap = about["overlap"]
        if about["link"]:
            _slow_down(communicator, about["link"])
    trainer = og.Trainer(folder / "program", distributed=communicator, options={"threads": about["threads"]})
    ranks, engine = trainer.ranks, trainer.engine
    count = about["batch"] // ranks.size
    draw = np.random.default_rng(ranks.rank)
    x = draw.standard_normal((count, 3, about["size"], about["size"])).astype(np.float32)
    batch = {"x": x, "target": draw.integers(0, 1000, count)}
    spent: dict[str, float] = {}
    if ranks.several:
        for name in ("_sum_gradients", "_accumulated"):
            _timed(engine, name, spent)
    laps: dict[str, list[float]] = {}
    for number in range(repeat + 2):
        ranks.meet()
        spent.clear()
        start = time.perf_counter()
        trainer.step(batch, outputs=[])
        total = time.perf_counter() - start
        if number >= 2:
            parts = {
                "step": total,
                "gradients": spent.get("_accumulated", 0.0),
                "sum": spent.get("_sum_gradients", 0.0),
            }
            for name, seconds in parts.items():
                laps.setdefault(name, []).append(seconds)
    if ranks.leader:
        (folder / "times.json").write_text(json.dumps({name: statistics.median(s) for name, s in laps.items()}))


def _slow_down(communicator: Any, link: float) -> None:
    """Let each sum take the time besides in which a link of so many Gbit/s moves its bytes."""
    add, moved = communicator.all_reduce, 2 * (communicator.size - 1) / communicator.size

    def all_reduce(array: np.ndarray) -> None:
        add(array)
        time.sleep(moved * array.nbytes * 8e-9 / link)

    communicator.all_reduce = all_reduce


def _timed(engine: Any, name: str, spent: dict[str, float]) -> None:
    original = getattr(engine, name)

    def call(*arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*arguments, **named)
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - start

    setattr(engine, name, call)


# -- all ranks ---------------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> list[Row]:
    """A row for one process of one thread and of all, and for each engine and number of ranks of one thread each.

    They take turns; the times are those of the fastest turn.
    """
    from tests.support.launching import ENGINES, command, environment, missing

    if arguments.quick:
        arguments.turns, arguments.repeat = 1, 3
    engines = [engine for engine in ENGINES if not missing(engine)]
    for engine in ENGINES:
        if missing(engine):
            print(f"{engine}: {missing(engine)}", file=sys.stderr)
    alone = {"engine": "", "ranks": 1, "overlap": False, "link": 0}
    rows: list[Row] = [{**alone, "threads": 1}]
    for ranks in arguments.ranks:
        rows.append({**alone, "threads": ranks})
        several = {"ranks": ranks, "threads": 1}
        rows += [{**several, "engine": engine, "overlap": o, "link": 0} for engine in engines for o in (False, True)]
        rows += [
            {**several, "engine": engine, "overlap": o, "link": link}
            for engine in engines
            for link in arguments.link
            for o in (False, True)
        ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_program(folder / "program", arguments.size)
        script = ["-m", "benchmarks.distributed", "--work", str(folder), "--repeat", str(arguments.repeat)]
        for _ in range(arguments.turns):
            for row in rows:
                (folder / "about.json").write_text(
                    json.dumps({**row, "batch": arguments.batch, "size": arguments.size})
                )
                words = command(row["engine"], row["ranks"], *script) if row["engine"] else [sys.executable, *script]
                subprocess.run(words, check=True, env=environment(), timeout=1800)
                times = json.loads((folder / "times.json").read_text())
                if "step" not in row or times["step"] < row["step"]:
                    row.update(times)
    return rows


def show(rows: Sequence[Row]) -> None:
    alone, lines = rows[0]["step"], []
    for row in rows:
        threads = f"{row['threads']} thread{'s' if row['threads'] > 1 else ''}"
        title = f"{row['engine']}, {row['ranks']} ranks" if row["engine"] else f"one process, {threads}"
        link = f"{row['link']:g} Gbit/s" if row["link"] else "-"
        parts = [f"{1e3 * row[k]:.0f}" if row.get(k) else "-" for k in ("step", "gradients", "sum")]
        overlap = ("yes" if row["overlap"] else "no") if row["engine"] else "-"
        lines.append([title, link, overlap, *parts, f"{alone / row['step']:.2f}"])
    print(table(["ResNet-18", "link", "overlap", "step ms", "gradients ms", "sum ms", "speed-up"], lines))


def write_program(folder: Path, size: int) -> None:
    import torch

    import onnx_convgrad as og
    from benchmarks.networks import export, network

    module = network("resnet18").module()
    model = export(module, torch.zeros(2, 3, size, size), dynamic_batch=True)
    optimizer = og.optim.SGD(lr=1e-3, momentum=0.9)
    og.build_training(model, loss={"y": "cross_entropy"}, optimizer=optimizer, outputs=[]).save(folder)


def main(words: Sequence[str] | None = None) -> None:
    options = parser("distributed", __doc__, "one turn of three steps", timing=False)
    options.add_argument("--ranks", type=int, nargs="+", default=[2])
    options.add_argument("--batch", type=int, default=32)
    options.add_argument("--size", type=int, default=112)
    options.add_argument("--repeat", type=int, default=10, help="steps of a turn")
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--link", type=float, nargs="+", default=[], help="simulated links, in Gbit/s")
    options.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = options.parse_args(words)
    if arguments.work:
        work(arguments.work, arguments.repeat)
    else:
        carry_out(options, words, "distributed", measure, show)


if __name__ == "__main__":
    main()
