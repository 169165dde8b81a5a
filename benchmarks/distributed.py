"""Steps on several ranks: gradients, their sum over all ranks, and the update, against one process.

python -m benchmarks.distributed                        # ResNet-18, 32 images of 112 pixels, on mpiexec and torchrun
python -m benchmarks.distributed --ranks 2 4 --batch 64 --size 64
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.program import table

# -- one rank ----------------------------------------------------------------------------------------------------------


def work(folder: Path, repeat: int) -> None:
    """Time the parts of a step on this rank; rank 0 writes them."""
    import onnx_convgrad as og

    about = json.loads((folder / "about.json").read_text())
    trainer = og.Trainer(folder / "program", distributed="auto", options={"threads": about["threads"]})
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


def measure(arguments: argparse.Namespace) -> Iterator[list[str]]:
    """Rows for one process of one thread and of all, and for each engine and number of ranks of one thread each."""
    from tests.support.launching import ENGINES, command, environment, missing

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_program(folder / "program", arguments.size)

        def run(words: Sequence[str], threads: int) -> dict[str, float]:
            about = {"threads": threads, "batch": arguments.batch, "size": arguments.size}
            (folder / "about.json").write_text(json.dumps(about))
            subprocess.run(words, check=True, env=environment(), timeout=1800)
            return json.loads((folder / "times.json").read_text())  # type: ignore[no-any-return]

        script = ["-m", "benchmarks.distributed", "--work", str(folder), "--repeat", str(arguments.repeat)]
        alone = run([sys.executable, *script], 1)["step"]
        rows = [("one process, 1 thread", {"step": alone})]
        for ranks in arguments.ranks:
            rows.append((f"one process, {ranks} threads", run([sys.executable, *script], ranks)))
            for engine in ENGINES:
                if missing(engine):
                    print(f"{engine}: {missing(engine)}", file=sys.stderr)
                    continue
                rows.append((f"{engine}, {ranks} ranks", run(command(engine, ranks, *script), 1)))
        for title, times in rows:
            parts = [f"{1e3 * times[k]:.0f}" if times.get(k) else "-" for k in ("step", "gradients", "sum")]
            yield [title, *parts, f"{alone / times['step']:.2f}"]


def write_program(folder: Path, size: int) -> None:
    import torch

    import onnx_convgrad as og
    from benchmarks.networks import export, network

    module = network("resnet18").module()
    model = export(module, torch.zeros(2, 3, size, size), dynamic_batch=True)
    optimizer = og.optim.SGD(lr=1e-3, momentum=0.9)
    og.build_training(model, loss={"y": "cross_entropy"}, optimizer=optimizer, outputs=[]).save(folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distributed", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.repeat)
    else:
        print(table(["ResNet-18", "step ms", "gradients ms", "sum ms", "speed-up"], list(measure(arguments))))


if __name__ == "__main__":
    main()
