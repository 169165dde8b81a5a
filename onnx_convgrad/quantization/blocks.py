"""Find the layers and blocks of a quantized model that are reconstructed one after another.

A layer is a product with one quantized weight, with the activation behind it. A block begins and ends where a single value
connects the parts of the graph, such as a residual block with all its paths (Li et al. 2021, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.facts import is_activation
from onnx_convgrad.autodiff.layers import layer_of
from onnx_convgrad.frontend.quantizers import before_quantizer
from onnx_convgrad.ir.loop_bodies import depending
from onnx_convgrad.ir.namespace import named_values
from onnx_convgrad.ir.nodes import ancestors, is_op
from onnx_convgrad.surgery.quantization import array_of, quantized


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A product with a quantized weight.

    Attributes:
        node: The product.
        weight: The float weight, the operand of `quantizer`.
        quantizer: The QuantizeLinear of the weight.
        real: The result of the DequantizeLinear behind it.
        source: The value before the quantizer of the data operand.
        channel_axis: The axis of the output channels in the result, counted from its end.
    """

    node: ir.Node
    weight: ir.Value
    quantizer: ir.Node
    real: ir.Value
    source: ir.Value
    channel_axis: int

    @property
    def name(self) -> str:
        """The name of the weight."""
        return self.weight.name or ""

    @property
    def numbers(self) -> np.ndarray:
        """The float weight."""
        return array_of(self.weight)

    @property
    def levels(self) -> np.ndarray:
        """The levels that the quantizer rounds the weight to."""
        return quantized(self.quantizer, self.numbers)

    @property
    def dtype(self) -> ir.DataType:
        """The type of the levels."""
        return self.quantizer.outputs[0].dtype or ir.DataType.INT8

    @property
    def result(self) -> ir.Value:
        """The result, after the activation if it alone reads the product."""
        y = self.node.outputs[0]
        uses = list(y.uses())
        if len(uses) == 1 and is_activation(uses[0].node):
            return uses[0].node.outputs[0]
        return y


@dataclass(frozen=True, slots=True)
class Block:
    """Layers that are reconstructed together: the part of the graph between `sources` and `result`."""

    sources: tuple[ir.Value, ...]
    result: ir.Value
    layers: tuple[QuantizedLayer, ...]


def layers_of(graph: ir.Graph) -> list[QuantizedLayer]:
    """The layers of a graph with float weights behind quantizers, in order."""
    return [layer for node in graph if (layer := _layer(node)) is not None]


def _layer(node: ir.Node) -> QuantizedLayer | None:
    product = layer_of(node)
    if product is None or product.features is None:
        return None
    x, real = node.inputs[0], product.weight
    back = real.producer()
    quantizer = back.inputs[0].producer() if is_op(back, "DequantizeLinear") and back.inputs[0] is not None else None
    weight = quantizer.inputs[0] if is_op(quantizer, "QuantizeLinear") else None
    if weight is None or weight.const_value is None or quantizer is None or x is None:
        return None
    return QuantizedLayer(node, weight, quantizer, real, before_quantizer(x), product.features.of_result)


def single_layers(graph: ir.Graph) -> list[Block]:
    """Each layer as a block of its own."""
    return list(map(_alone, layers_of(graph)))


def _alone(layer: QuantizedLayer) -> Block:
    return Block((layer.source,), layer.result, (layer,))


def blocks_of(graph: ir.Graph) -> list[Block]:
    """The blocks between values through which every path from the inputs to the outputs passes.

    The first block begins at the inputs of the graph. Nodes without weights belong to the block before them.
    """
    left, blocks = layers_of(graph), list[Block]()
    inputs = tuple(v for v in graph.inputs if not v.is_initializer())
    for cut in _cuts(graph):
        inside = ancestors(cut)
        new = tuple(layer for layer in left if layer.node in inside)
        left = [layer for layer in left if layer.node not in inside]
        if new:
            blocks.append(Block((blocks[-1].result,) if blocks else inputs, cut, new))
        elif blocks:
            blocks[-1] = replace(blocks[-1], result=cut)
    return [*blocks, *map(_alone, left)]


def _cuts(graph: ir.Graph) -> Iterator[ir.Value]:
    """The values, before quantizers, after which nothing but them is read, in order."""
    position = {node: i for i, node in enumerate(graph)}
    inputs = [v for v in graph.inputs if not v.is_initializer()]
    data = {*inputs, *(v for node in depending(graph, inputs) for v in node.outputs)}
    end = len(position)
    last = {v: max([position[use.node] for use in v.uses() if use.node in position] or [-1]) for v in data}
    last |= {v: end for v in graph.outputs if v in data}
    alive = set(inputs)
    for node, i in position.items():
        alive.update(v for v in node.outputs if v in data)
        alive = {v for v in alive if last[v] > i}
        if len(alive) == 1 and not is_op(node, "QuantizeLinear", "DequantizeLinear"):
            (value,) = alive
            if value in node.outputs:
                yield value


def float_name(value: ir.Value, real: ir.Graph) -> str | None:
    """The name in the float model of a value of the quantized one; `None` if the float model has no such value."""
    names, name = named_values(real), value.name or ""
    return next((n for n in (name, name.removesuffix("_QuantizeLinear_Input")) if n in names), None)
