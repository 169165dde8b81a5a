"""Table (h): the overhead of the trainer per step: time of a call minus time inside ONNX Runtime; and PyTorch's step.

python -m benchmarks.trainer                   # small networks and ResNet-18
python -m benchmarks.trainer tiny --threads 1
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnxruntime
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import onnx_convgrad as og
from benchmarks.networks import NETWORKS, export, network
from benchmarks.program import Row, announced, carry_out, parser, table
from tests.support.zoo import stacks

WAYS = {"step": "step()", "fit": "fit()", "bar": "fit() with a bar"}


Case = tuple[str, nn.Module, Any, Any, int]
"""Title, network, data, labels, and number of steps that are timed together."""


def tiny() -> Case:
    """A network with microseconds of arithmetic, so that overhead dominates."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10)]
    return "tiny", nn.Sequential(*layers), torch.randn(8, 1, 8, 8), torch.randint(10, (8,)), 200


def perceptron() -> Case:
    """A multilayer perceptron of 11,386 parameters."""
    torch.manual_seed(0)
    return "MLP", nn.Sequential(*stacks.mlp(64, 96, 48, 10)), torch.randn(32, 64), torch.randint(10, (32,)), 200


def digits() -> Case:
    """The network of the example's digits."""
    torch.manual_seed(0)
    return "digits CNN", stacks.small_cnn(8), torch.randn(64, 1, 8, 8), torch.randint(10, (64,)), 50


SMALL: Mapping[str, Callable[[], Case]] = {"tiny": tiny, "mlp": perceptron, "digits": digits}


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
    if name in SMALL:
        title, module, x, target, steps = SMALL[name]()
    else:
        net = network(name)
        title, module, (x, target), steps = net.title, net.module(), net.data(batch), 2
    torch.set_num_threads(threads)
    its = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
    optimizer = og.optim.SGD(lr=1e-3, momentum=0.9)
    program = og.build_training(export(module, x), loss={"y": "cross_entropy"}, optimizer=optimizer, outputs=[])
    feed = {"x": x.numpy(), "target": target.numpy().astype(np.int64)}
    trainer = og.Trainer(program, options={"threads": threads})

    def step() -> None:
        for _ in range(steps):
            trainer.step(feed)

    def eager() -> None:
        for _ in range(steps):
            its.zero_grad()
            loss = cross_entropy(module(x), target)
            loss.backward()
            its.step()
            loss.item()

    def fit(progress: str) -> None:
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere, contextlib.redirect_stderr(nowhere):
            trainer.fit([feed] * steps, epochs=trainer.progress.epoch + 1, progress=progress)

    calls = {"step": step, "fit": lambda: fit("text"), "bar": lambda: fit("bar")}
    laps: dict[str, list[tuple[float, float]]] = {way: [] for way in calls}
    eager()
    by_torch, inside = [], InRuntime()
    with inside.counted():
        trainer.step(feed)
        for _ in range(repeats):
            by_torch.append(timeit.timeit(eager, number=1) / steps)
            for way, call in calls.items():
                laps[way].append(beyond(call, steps, inside))
    moving = len(program.manifest.moving())
    return {
        "title": title,
        "x": list(x.shape),
        "moving": moving,
        "run": statistics.median(run for pairs in laps.values() for _, run in pairs),
        "torch": statistics.median(by_torch),
        "beyond": {way: statistics.median(extra for extra, _ in pairs) for way, pairs in laps.items()},
    }


def print_trainer(rows: Sequence[Row]) -> None:
    columns = ["network", "input", "values", "run ms"]
    columns += [cell for way in WAYS.values() for cell in (f"{way} + us", "of the run")]
    columns.append("PyTorch / step()")
    body = []
    for row in rows:
        cells = [row["title"], "x".join(map(str, row["x"])), str(row["moving"]), f"{1e3 * row['run']:.3f}"]
        for way in WAYS:
            cells += [f"{1e6 * row['beyond'][way]:.0f}", f"{row['beyond'][way] / row['run']:.2%}"]
        cells.append(f"{row['torch'] / (row['run'] + row['beyond']['step']):.2f}")
        body.append(cells)
    print(f"\n{table(columns, body)}")


def measured(arguments: argparse.Namespace) -> list[Row]:
    names = announced(arguments.names or [*SMALL, "resnet18"])
    return [measure(name, arguments.batch, arguments.threads, arguments.repeat) for name in names]


def main(words: Sequence[str] | None = None) -> None:
    options = parser("trainer", __doc__, "three repeats")
    names = f"of {', '.join([*SMALL, *NETWORKS])}; the first {len(SMALL)} and resnet18 by default"
    options.add_argument("names", nargs="*", metavar="NETWORK", help=names)
    options.add_argument("--batch", type=int, default=4)
    carry_out(options, words, "trainer", measured, print_trainer, [*SMALL, *NETWORKS])


if __name__ == "__main__":
    main()
