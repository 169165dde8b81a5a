"""Measure the speeds that the cost model uses, each with one small model.

The formulas are those of `products` and `movement` in `onnx_convgrad.lowering.cost`, solved for the rate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.progress import announce
from onnx_convgrad.bench.timing import Bound, Turns, interleave
from onnx_convgrad.checking.random_inputs import Feed
from onnx_convgrad.ir.emit import Emitter, empty_model
from onnx_convgrad.ir.targets import TARGETS, Rates

Shape = tuple[int, ...]


def probe(
    op_type: str, *shapes: Sequence[int], constants: Sequence[Sequence[int]] = (), length: int = 1, **attributes: Any
) -> tuple[ir.Model, Feed]:
    """A node, or a chain of `length` equal ones, with random operands of these shapes, and with `constants` behind them."""
    model, rng = empty_model("probe"), np.random.default_rng(0)
    e = Emitter(model.graph)
    kind = ir.TensorType(ir.DataType.FLOAT)
    model.graph.inputs.extend(ir.Value(name=f"x{i}", shape=ir.Shape(s), type=kind) for i, s in enumerate(shapes))
    value, *others = [*model.graph.inputs, *map(e.ints, constants)]
    for _ in range(length):
        value = e.op(op_type, value, *others, **attributes)
    value.type = kind
    model.graph.outputs.append(value)
    return model, {
        v.name or "": rng.standard_normal(s).astype(np.float32) for v, s in zip(model.graph.inputs, shapes, strict=True)
    }


def calibrate(threads: int, *, provider: str = "cpu", repeats: int = 5) -> Rates:
    """Measure the rates of a provider, `"cpu"` or `"cuda"`; takes some seconds.

    Raises:
        ExecutionError: ONNX Runtime or the provider is missing.
    """
    node = 0.0

    def timed(name: str, *node_and_shapes: Any, length: int = 1, **others: Any) -> float:
        announce(name)
        model, feed = probe(*node_and_shapes, length=length, **others)
        side = Turns(Bound(model, feed, threads, provider))
        return max(interleave({"probe": side}, repeats=repeats)["probe"] / length - node, 1e-9)

    large = provider == "cuda"  # small probes would leave most of a GPU idle
    # all threads take part in this one, as in most nodes of models
    node = timed("one kernel", "Add" if large else "MatMul", (2, 8, 8), (2, 8, 8), length=100)
    m = n = k = 4096 if large else 1024
    images = 512 if large else 4
    sizes = [2**p for p in range(17, 26)]
    speeds = {3 * 4 * size: 12 * size / timed("passes over memory", "Add", (size,), (size,)) for size in sizes}
    memory = speeds[3 * 4 * sizes[-1]]
    cached = max(memory, statistics.median(list(speeds.values())[1:5]))  # the smallest fits the cores' own caches
    cache = float(max(b for b, speed in speeds.items() if speed > 0.8 * cached))
    product = timed("matrix products", "MatMul", (m, k), (k, n))
    gemm = 2.0 * m * n * k * (1 + 2 / n + 2 / k) / product  # `small` is corrected for below
    few, columns, batch = 16, 256, 64 if large else 8  # these fit the cache of a processor
    narrow = timed("narrow matrix products", "MatMul", (few, k), (batch, k, columns))
    ideal = 2.0 * batch * few * columns * k / gemm
    moved = 4 * (few * k + batch * (k + few) * columns)
    waiting = 1.6 * moved * (1 / memory - 1 / cached) if large else 0.0
    small = max(1.0, few * ((narrow - waiting) / ideal - 1 - 2 / columns - 2 / k))
    gemm *= 1 + 0.2 * small / m
    grid = (images, 64, 56, 56)
    strided = timed("single elements", "Slice", grid, constants=([0, 0], [56, 56], [2, 3], [2, 2]))
    item = strided / (images * 64 * 28 * 28)
    padded = timed("short rows", "Pad", (images, 512, 7, 7), constants=[[0, 0, 1, 1, 0, 0, 1, 1]])
    run = padded / (images * 512 * 9) / 1.2
    pixels = images * 64 * 56 * 56
    others = images * 64 * 4.5 * run + 8 * pixels / (
        memory if large else cached
    )  # the start of each image, and the pass
    depthwise = timed("depthwise convolutions", "Conv", grid, (64, 1, 3, 3), group=64, pads=[1, 1, 1, 1])
    tap = max(depthwise - others, 0.1 * others) / (9 * pixels) / (1 + 16 / 56)
    rows = (4 * images, 192, 196)
    turned = timed("passes by one thread", "Transpose", rows, perm=[1, 0, 2])
    alone = max(1.0, turned * (memory if large else cached) / (8 * math.prod(rows)))
    wave = TARGETS["cuda"].rates.wave if large else 0.0
    rates = Rates(gemm, small, cached, memory, cache, node, item, run, tap, alone, wave)
    return Rates(**{name: float(f"{value:.4g}") for name, value in asdict(rates).items()})
