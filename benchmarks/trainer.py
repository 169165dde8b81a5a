"""Table (h): the overhead of the trainer per step: time of a call minus time inside ONNX Runtime.

python -m benchmarks.trainer                   # a tiny network and ResNet-18
python -m benchmarks.trainer tiny --threads 1
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnxruntime
import torch
from torch import nn

import onnx_convgrad as og
from benchmarks.networks import NETWORKS, export, network
from benchmarks.program import Row, announced, carry_out, parser, table

WAYS = {"step": "step()", "fit": "fit()", "bar": "fit() with a bar"}


def tiny() -> tuple[nn.Module, Any, Any]:
    """A network with microseconds of arithmetic, so that overhead dominates."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10)]
    return nn.Sequential(*layers), torch.randn(8, 1, 8, 8), torch.randint(10, (8,))


class InRuntime:
    """Measures the seconds inside `InferenceSession.run_with_iobinding`."""

    seconds = 0.0

    def counted(self) -> contextlib.AbstractContextManager[Any]:
        original = onnxruntime.InferenceSession.run_with_iobinding

        def timed(*arguments: Any) -> None:
            start = time.perf_counter()
            original(*arguments)
            self.seconds += time.perf_counter() - start

        return mock.patch.object(onnxruntime.InferenceSession, "run_with_iobinding", timed)


def beyond(call: Callable[[], object], steps: int, inside: InRuntime) -> tuple[float, float]:
    """Seconds per step outside the runtime, and inside."""
    before, start = inside.seconds, time.perf_counter()
    call()
    total, runtime = time.perf_counter() - start, inside.seconds - before
    return (total - runtime) / steps, runtime / steps


def measure(name: str, batch: int, threads: int, repeats: int) -> Row:
    if name == "tiny":
        module, x, target = tiny()
        title, steps = "tiny", 200
    else:
        net = network(name)
        module, (x, target) = net.module(), net.data(batch)
        title, steps = net.title, 2
    optimizer = og.optim.SGD(lr=1e-3, momentum=0.9)
    program = og.build_training(export(module, x), loss={"y": "cross_entropy"}, optimizer=optimizer, outputs=[])
    feed = {"x": x.numpy(), "target": target.numpy().astype(np.int64)}
    trainer = og.Trainer(program, options={"threads": threads})

    def step() -> None:
        for _ in range(steps):
            trainer.step(feed)

    def fit(progress: str) -> None:
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere, contextlib.redirect_stderr(nowhere):
            trainer.fit([feed] * steps, epochs=trainer.progress.epoch + 1, progress=progress)

    calls = {"step": step, "fit": lambda: fit("text"), "bar": lambda: fit("bar")}
    laps: dict[str, list[tuple[float, float]]] = {way: [] for way in calls}
    inside = InRuntime()
    with inside.counted():
        trainer.step(feed)
        for _ in range(repeats):
            for way, call in calls.items():
                laps[way].append(beyond(call, steps, inside))
    moving = len(program.manifest.moving())
    return {
        "title": title,
        "x": list(x.shape),
        "moving": moving,
        "run": statistics.median(run for pairs in laps.values() for _, run in pairs),
        "beyond": {way: statistics.median(extra for extra, _ in pairs) for way, pairs in laps.items()},
    }


def print_trainer(rows: Sequence[Row]) -> None:
    columns = ["network", "input", "values", "run ms"]
    columns += [cell for way in WAYS.values() for cell in (f"{way} + us", "of the run")]
    body = []
    for row in rows:
        cells = [row["title"], "x".join(map(str, row["x"])), str(row["moving"]), f"{1e3 * row['run']:.3f}"]
        for way in WAYS:
            cells += [f"{1e6 * row['beyond'][way]:.0f}", f"{row['beyond'][way] / row['run']:.2%}"]
        body.append(cells)
    print(f"\n{table(columns, body)}")


def measured(arguments: argparse.Namespace) -> list[Row]:
    names = announced(arguments.names or ["tiny", "resnet18"])
    return [measure(name, arguments.batch, arguments.threads, arguments.repeat) for name in names]


def main(words: Sequence[str] | None = None) -> None:
    options = parser("trainer", __doc__, "three repeats")
    names = f"of tiny, {', '.join(NETWORKS)}; tiny and resnet18 by default"
    options.add_argument("names", nargs="*", metavar="NETWORK", help=names)
    options.add_argument("--batch", type=int, default=4)
    carry_out(options, words, "trainer", measured, print_trainer, ["tiny", *NETWORKS])


if __name__ == "__main__":
    main()
