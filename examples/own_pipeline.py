"""Differentiate a model in the middle of a pipeline of `onnx_ir` passes.

`Differentiate` is a pass like any other: passes before it prepare the model, passes after it clean up the gradient graph.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from onnx_convgrad.pipeline import passes as og_passes
from onnx_convgrad.runtime import run

MODEL = Path(__file__).parent / "models" / "digits_cnn.onnx"


class RenameOutputs(ir.passes.InPlacePass):
    """A pass of your own: call every gradient `d_<name>`."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        for value in model.graph.outputs:
            if value.name and value.name.endswith("_grad"):
                value.name = f"d_{value.name.removesuffix('_grad')}"
        return ir.passes.PassResult(model, modified=True)


pipeline = ir.passes.PassManager(
    [
        common.IdentityEliminationPass(),
        og_passes.Differentiate(wrt="inputs", of="logits", cotangents="ones", lower=False),
        RenameOutputs(),  # abstract gradient operators can be seen and replaced here
        og_passes.Lower(),
        common.CommonSubexpressionEliminationPass(),
    ]
)
model = pipeline(ir.load(MODEL)).model
operators = Counter(node.op_type for node in model.graph)
print(", ".join(f"{count} {name}" for name, count in operators.most_common(5)))
image = np.random.default_rng(0).random((1, 1, 8, 8), dtype=np.float32)
results = run(ir.to_proto(model), {"image": image})
print({name: array.shape for name, array in results.items()})
