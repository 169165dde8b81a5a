"""Single nodes with their operands, to compare what is written for an operator with its kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnx_convgrad.ir.emit import CANONICAL_OPSET

MICROSOFT = "com.microsoft"


@dataclass
class Kernel:
    """One node and its operands, `None` for an absent one."""

    op: str
    inputs: list[np.ndarray | None]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("y",)
    opset: int = CANONICAL_OPSET
    domain: str = ""
    name: str = ""
    tolerance: float = 1e-5
    floats: tuple[str, ...] = ()
    """Results of float32 whose type ONNX Runtime does not infer."""
    stored: tuple[int, ...] = ()
    """The places of operands that are initializers."""

    def __str__(self) -> str:
        shapes = "x".join("-" if a is None else str(list(a.shape)) for a in self.inputs).replace(" ", "")
        options = ",".join(f"{k}={v}" for k, v in self.attributes.items())
        return f"{self.op}-{self.opset} {self.name} {shapes} {options}"

    def model(self) -> onnx.ModelProto:
        """The node as a model, whose operand `x<place>` is an input or an initializer."""
        named = {f"x{i}": a for i, a in enumerate(self.inputs) if a is not None}
        operands = [f"x{i}" if a is not None else "" for i, a in enumerate(self.inputs)]
        node = helper.make_node(self.op, operands, self.outputs, name="node", domain=self.domain, **self.attributes)
        values = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for name, a in named.items()
            if name in self.feed
        ]
        initializers = [numpy_helper.from_array(a, name) for name, a in named.items() if name not in self.feed]
        results = [helper.make_empty_tensor_value_info(name) for name in self.outputs if name]
        for result in results:
            if result.name in self.floats:
                result.type.tensor_type.elem_type = TensorProto.FLOAT
        opsets = [helper.make_opsetid("", self.opset)]
        opsets += [helper.make_opsetid(self.domain, 1)] if self.domain else []
        graph = helper.make_graph([node], "g", values, results, initializers)
        return helper.make_model(graph, opset_imports=opsets, ir_version=10 if self.opset < 23 else 11)

    @property
    def feed(self) -> dict[str, np.ndarray]:
        return {f"x{i}": a for i, a in enumerate(self.inputs) if a is not None and i not in self.stored}
