"""Differentiate a model with an operator of a private domain, whose rule comes from a plugin (`examples/plugin`).

`pip install examples/plugin` makes the rule known; this example imports it instead.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

import onnx_convgrad as og

sys.path.append(str(Path(__file__).parent / "plugin"))
import swish2_rules  # noqa: F401


class Swish2(OpRun):
    """The operator for ONNX's reference evaluator; ONNX Runtime loads custom operators from a library."""

    op_domain = "my.domain"

    def _run(self, x: np.ndarray, beta: float = 2.0) -> tuple[Any]:
        return (x / (1 + np.exp(-beta * x)),)


model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["": 21, "my.domain": 1]>
    g (double[1,2,6,6] x, double[3,2,3,3] w) => (double[1,3,4,4] y) {
        c = Conv(x, w)
        y = my.domain.Swish2 <beta = 1.5> (c)
    }""")

generator = np.random.default_rng(0)
feed = {"x": generator.standard_normal((1, 2, 6, 6)), "w": generator.standard_normal((3, 2, 3, 3))}
augmented = og.augment(model, wrt=["x", "w"], cotangents="ones")
y, *gradients = ReferenceEvaluator(augmented, new_ops=[Swish2]).run(None, feed)

primal = ReferenceEvaluator(model, new_ops=[Swish2])
for name, gradient in zip(("x", "w"), gradients, strict=True):
    direction, h = generator.standard_normal(gradient.shape), 1e-6
    ahead, behind = (primal.run(None, {**feed, name: feed[name] + s * direction})[0].sum() for s in (h, -h))
    numeric, exact = (ahead - behind) / (2 * h), np.vdot(gradient, direction)
    print(f"d(sum y)/d{name} along a random direction: {exact:.8f}, numerically {numeric:.8f}")
    assert abs(numeric - exact) <= 1e-6 * np.linalg.norm(gradient)
print(f"{len(augmented.graph.node)} nodes; {sum(n.domain == 'my.domain' for n in augmented.graph.node)} of my.domain")
