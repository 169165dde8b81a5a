"""Build untrained networks as ONNX models with onnx_ir; the other examples use these layers.

python examples/networks.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape


class Network:
    """Each method adds a layer and returns its output. Weights are initialized as in He et al. (2015)."""

    def __init__(self, *shape: int, seed: int = 0) -> None:
        self.tape, self.generator, self.count = Tape(), np.random.default_rng(seed), 0
        self.image = ir.Value(name="image", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N", *shape]))

    def layer(self, op: str, x: ir.Value, fan_in: int, weight: tuple[int, ...], **attributes: Any) -> ir.Value:
        """Add an operator with one weight; names are numbered in order: `conv1.weight`, `convtranspose4.weight`."""
        self.count += 1
        drawn = self.generator.standard_normal(weight) * np.sqrt(2 / fan_in)
        tensor = ir.tensor(drawn.astype(np.float32), name=f"{op.lower()}{self.count}.weight")
        return self.tape.op(op, [x, self.tape.initializer(tensor)], attributes, name=f"{op.lower()}{self.count}")

    def block(self, x: ir.Value, cin: int, cout: int) -> ir.Value:
        """Convolution 3x3, BatchNormalization, ReLU."""
        x = self.layer("Conv", x, 9 * cin, (cout, cin, 3, 3), pads=[1, 1, 1, 1])
        vectors = []
        for name, start in {"weight": 1, "bias": 0, "running_mean": 0, "running_var": 1}.items():
            tensor = ir.tensor(np.full(cout, start, np.float32), name=f"bn{self.count}.{name}")
            vectors.append(self.tape.initializer(tensor))
        return self.tape.op("Relu", [self.tape.op("BatchNormalization", [x, *vectors])])

    def halve(self, x: ir.Value) -> ir.Value:
        return self.tape.op("MaxPool", [x], {"kernel_shape": [2, 2], "strides": [2, 2]})

    def double(self, x: ir.Value, cin: int, cout: int) -> ir.Value:
        return self.layer("ConvTranspose", x, cin, (cin, cout, 2, 2), strides=[2, 2])

    def linear(self, x: ir.Value, cin: int, cout: int) -> ir.Value:
        return self.layer("Gemm", self.tape.op("Flatten", [x]), cin, (cin, cout))

    def op(self, kind: str, *operands: ir.Value | np.ndarray, name: str | None = None, **attributes: int) -> ir.Value:
        """Add any operator; arrays become constants, and a `name` makes the result known to losses."""
        stored = [
            x if isinstance(x, ir.Value) else self.tape.op("Constant", [], {"value": ir.tensor(x)}) for x in operands
        ]
        output = self.tape.op(kind, stored, attributes)
        output.name, output.type = name, ir.TensorType(ir.DataType.FLOAT) if name else None
        return output

    def model(self, output: ir.Value, name: str = "logits", *more: ir.Value) -> ir.Model:
        output.name, output.type = name, ir.TensorType(ir.DataType.FLOAT)
        stored, opset = self.tape.initializers, {"": 21}
        graph = ir.Graph([self.image], [output, *more], nodes=self.tape.nodes, initializers=stored, opset_imports=opset)
        return ir.Model(graph, ir_version=10)


if __name__ == "__main__":
    small = Network(1, 8, 8)
    for node in small.model(small.linear(small.halve(small.block(small.image, 1, 4)), 64, 10)).graph:
        print(node.outputs[0].name, "=", node.op_type, *(value.name for value in node.inputs if value))
