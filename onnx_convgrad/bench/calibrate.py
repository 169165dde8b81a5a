"""Measure the speeds that the cost model uses, each with one small model.

The formulas are those of `product_cost` and `movement_cost` in `onnx_convgrad.lowering.cost`, solved for the rate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnx_convgrad.base.progress import announce
from onnx_convgrad.bench.timing import Bound, Turns, interleave
from onnx_convgrad.ir.targets import TARGETS, Rates

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Probe:
    """A node, or a chain of equal nodes, to be timed: operand shapes, constant operands, attributes."""

    op_type: str
    shapes: tuple[Shape, ...]
    constants: tuple[Sequence[int], ...] = ()
    attributes: tuple[tuple[str, Any], ...] = ()
    length: int = 1

    def model(self) -> onnx.ModelProto:
        inputs = [helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, s) for i, s in enumerate(self.shapes)]
        constants = [numpy_helper.from_array(np.asarray(c, np.int64), f"c{i}") for i, c in enumerate(self.constants)]
        names = [*(v.name for v in inputs), *(c.name for c in constants)]
        nodes = []
        for i in range(self.length):
            nodes.append(helper.make_node(self.op_type, names, [f"y{i}"], **dict(self.attributes)))
            names[0] = f"y{i}"
        output = helper.make_tensor_value_info(f"y{self.length - 1}", TensorProto.FLOAT, None)
        graph = helper.make_graph(nodes, "probe", inputs, [output], constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    def seconds(self, provider: str, threads: int, repeats: int) -> float:
        """Return the median time of one node."""
        rng = np.random.default_rng(0)
        feed = {f"x{i}": rng.standard_normal(s).astype(np.float32) for i, s in enumerate(self.shapes)}
        side = Turns(Bound(self.model().SerializeToString(), feed, threads, provider))
        return interleave({"probe": side}, repeats=repeats)["probe"] / self.length


def calibrate(threads: int, *, provider: str = "cpu", repeats: int = 5) -> Rates:
    """Measure the rates of a provider, `"cpu"` or `"cuda"`; takes some seconds.

    Raises:
        ExecutionError: ONNX Runtime or the provider is missing.
    """
    node = 0.0

    def timed(name: str, probe: Probe) -> float:
        announce(name)
        return max(probe.seconds(provider, threads, repeats) - node, 1e-9)

    large = provider == "cuda"  # small probes would leave most of a GPU idle
    # all threads take part in this one, as in most nodes of models
    node = timed("one kernel", Probe("Add" if large else "MatMul", ((2, 8, 8), (2, 8, 8)), length=100))
    m = n = k = 4096 if large else 1024
    images = 512 if large else 4
    sizes = [2**p for p in range(17, 26)]
    speeds = {3 * 4 * size: 12 * size / timed("passes over memory", Probe("Add", ((size,), (size,)))) for size in sizes}
    memory = speeds[3 * 4 * sizes[-1]]
    cached = max(memory, statistics.median(list(speeds.values())[1:5]))  # the smallest fits the cores' own caches
    cache = float(max(b for b, speed in speeds.items() if speed > 0.8 * cached))
    product = timed("matrix products", Probe("MatMul", ((m, k), (k, n))))
    gemm = 2.0 * m * n * k * (1 + 2 / n + 2 / k) / product  # `small` is corrected for below
    few, columns, batch = 16, 256, 64 if large else 8  # these fit the cache of a processor
    narrow = timed("narrow matrix products", Probe("MatMul", ((few, k), (batch, k, columns))))
    ideal = 2.0 * batch * few * columns * k / gemm
    moved = 4 * (few * k + batch * (k + few) * columns)
    waiting = 1.6 * moved * (1 / memory - 1 / cached) if large else 0.0
    small = max(1.0, few * ((narrow - waiting) / ideal - 1 - 2 / columns - 2 / k))
    gemm *= 1 + 0.2 * small / m
    grid = (images, 64, 56, 56)
    strided = Probe("Slice", (grid,), ([0, 0], [56, 56], [2, 3], [2, 2]))
    item = timed("single elements", strided) / (images * 64 * 28 * 28)
    padded = Probe("Pad", ((images, 512, 7, 7),), ([0, 0, 1, 1, 0, 0, 1, 1],))
    run = timed("short rows", padded) / (images * 512 * 9) / 1.2
    attributes = (("group", 64), ("pads", [1, 1, 1, 1]))
    depthwise = Probe("Conv", (grid, (64, 1, 3, 3)), attributes=attributes)
    pixels = images * 64 * 56 * 56
    others = images * 64 * 4.5 * run + 8 * pixels / (
        memory if large else cached
    )  # the start of each image, and the pass
    tap = max(timed("depthwise convolutions", depthwise) - others, 0.1 * others) / (9 * pixels) / (1 + 16 / 56)
    rows = (4 * images, 192, 196)
    turned = timed("passes by one thread", Probe("Transpose", (rows,), attributes=(("perm", [1, 0, 2]),)))
    alone = max(1.0, turned * (memory if large else cached) / (8 * math.prod(rows)))
    wave = TARGETS["cuda"].rates.wave if large else 0.0
    rates = Rates(gemm, small, cached, memory, cache, node, item, run, tap, alone, wave)
    return Rates(**{name: float(f"{value:.4g}") for name, value in asdict(rates).items()})
