"""Training-mode BatchNormalization returns the statistics of its batch, blended with the stored ones outside."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_convgrad.backends.cpu.batch_statistics import ShareBatchStatistics
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of

TEXT = """(float[4, 3, 5] x, float[3] s) => (float[4, 3, 5] y, float[3] m, float[3] v)
    <float[3] a = {1, 1, 1}, float[3] b = {1, 1, 1}> {
        y, m, v = BatchNormalization <training_mode = 1, momentum = 0.75> (x, s, s, a, b)
    }"""


def test_equal_stored_statistics_stay_apart() -> None:
    """Operands that the kernel overwrites are scratch values that differ; see quirks.BATCH_NORMALIZATION_IN_PLACE."""
    model = ir.from_proto(graph_of(TEXT, opset=21))
    sharing = ShareBatchStatistics()
    assert sharing(model).modified
    (node,) = (n for n in model.graph if n.op_type == "BatchNormalization")
    assert node.inputs[3] is not node.inputs[4]
    assert not any(v is None or v.is_initializer() for v in node.inputs[3:5])
    assert [old.name for old in sharing.moved] == ["y_batch_mean", "y_batch_var"]
    x = (3 + np.random.default_rng(0).standard_normal((4, 3, 5))).astype(np.float32)
    got = run(model, {"x": x, "s": np.ones(3, np.float32)})
    np.testing.assert_allclose(got["m"], 0.75 + 0.25 * x.mean((0, 2)), rtol=1e-5)
    np.testing.assert_allclose(got["v"], 0.75 + 0.25 * x.var((0, 2)), rtol=1e-5)


def test_kept_statistics_are_left_alone() -> None:
    model = ir.from_proto(graph_of(TEXT, opset=21))
    assert not ShareBatchStatistics(keep=[model.graph.outputs[1]])(model).modified
