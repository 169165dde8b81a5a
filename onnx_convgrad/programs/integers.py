"""Parameters stored as integers: read through their DequantizeLinear, and rounded again after each update.

The gradient of a level q = w / s + z is s times that of the weight w, and the level 1 / s times as large as the weight.
Quantization-aware scaling (Lin et al. 2022, arXiv:2206.15472, section 3.2) therefore divides the gradient of q by s^2:

    q - eta (s g) / s^2 = (w - eta g) / s + z

so each optimizer updates w = (q - z) s, which is computed from the levels, as it does a float weight. Then

    q <- clip(round(w / s + r) + z),    r uniform between -1/2 and 1/2

Rounding is random, since updates of less than half a level would be lost by rounding to the nearest (Gupta et al. 2015,
arXiv:1502.02551, section 3.1). r is a hash of the number of the step, so that a run can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.programs.masks import Masks, initial_state
from onnx_convgrad.surgery.quantization import array_of, spread_over


def dequantizer(graph: ir.Graph, name: str) -> ir.Node | None:
    """The DequantizeLinear of a stored parameter; `None` for a floating one."""
    uses = graph.initializers[name].uses()
    return next((use.node for use in uses if is_op(use.node, "DequantizeLinear") and use.idx == 0), None)


def spell_out(e: Emitter, names: Iterable[str]) -> dict[str, ir.Value]:
    """Compute the real numbers of integer parameters without DequantizeLinear, in place; return them by parameter.

    ONNX Runtime refuses some graphs with a DequantizeLinear of an input: see quirks.INT8_LEVELS.
    """
    found: dict[str, ir.Value] = {}
    for name in names:
        node = dequantizer(e.graph, name)
        if node is not None:
            e.anchor, start = node, len(e.emitted)
            found[name] = _real_numbers(e, node, e.graph.initializers[name])
            for count, added in enumerate(e.emitted[start:], 1):
                added.name = f"{node.name}/real_{count}"
            node.outputs[0].replace_all_uses_with(found[name], replace_graph_outputs=True)
    e.anchor = None
    return found


def _real_numbers(e: Emitter, node: ir.Node, levels: ir.Value) -> ir.Value:
    """The result of a DequantizeLinear for levels, by the plain formula."""
    dtype = node.outputs[0].dtype or ir.DataType.FLOAT
    scale, zero = (spread_over(node, operand) for operand in (1, 2))
    numbers = e.cast(levels, dtype)
    if zero.any():
        numbers = e.sub(numbers, e.const(zero, dtype))
    return e.mul(numbers, e.const(scale, dtype))


class Rounding:
    """Reads the integer parameters of a graph, and writes their updates, in the graph of an emitter.

    Attributes:
        nodes: Parameter -> its DequantizeLinear in the canonical model; empty if all parameters are floating.
    """

    def __init__(self, e: Emitter, graph: ir.Graph, names: Iterable[str], done: ir.Value, seed: int) -> None:
        """`done` is the number of finished steps, from which the random bits of this one follow."""
        self.e = e
        self.nodes = {name: node for name in names if (node := dequantizer(graph, name)) is not None}
        if self.nodes:
            state = e.add(e.cast(done, ir.DataType.INT32), initial_state((seed, 1)))
            self._masks = Masks(e, state, len(self.nodes))

    def read(self, name: str, levels: ir.Value) -> ir.Value:
        """The real numbers of a parameter."""
        return _real_numbers(self.e, self.nodes[name], levels)

    def write(self, name: str, numbers: ir.Value) -> ir.Value:
        """The levels next to real numbers, above or below at random."""
        e, node, position = self.e, self.nodes[name], list(self.nodes).index(name)
        bits = e.reshape_like(e.cast(self._masks.bits(numbers, position), ir.DataType.FLOAT), numbers)
        step = e.const(spread_over(node, 1) * 2.0**-32, ir.DataType.FLOAT)
        moved = e.add(numbers, e.mul(bits, step))
        scale, n = array_of(node.inputs[1]), Call(node)
        given = node.inputs[2] if len(node.inputs) > 2 else None
        zero = np.zeros(scale.shape, array_of(node.inputs[0]).dtype) if given is None else array_of(given)
        return e.op("QuantizeLinear", moved, e.const(scale), e.const(zero),
                    axis=n.int("axis", 1), block_size=n.int("block_size", 0) or None)  # fmt: skip
