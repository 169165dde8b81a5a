"""Sparse weights become dense."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("as_node", [True, False])
def test_sparse_weights_become_dense(tmp_path: Path, *, linear: bool, as_node: bool) -> None:
    model = graph_of("(float[1,3,6,6] x) => (float[] y) { y = Conv (x, w) }")
    places = np.array([3, 40], np.int64) if linear else np.array([[0, 0, 1, 0], [1, 1, 1, 1]], np.int64)
    values = numpy_helper.from_array(np.array([2.0, -1.0], np.float32), "w")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(places, "w_indices"), [3, 3, 3, 3])
    if as_node:
        model.graph.node.insert(0, helper.make_node("Constant", [], ["w"], sparse_value=sparse))
    else:
        model.graph.sparse_initializer.append(sparse)
    onnx.save(model, tmp_path / "sparse.onnx")
    before = model.SerializeToString()
    for given in (model, tmp_path / "sparse.onnx"):
        made = og.augment(given, wrt="all")
        x = np.random.default_rng(1).standard_normal((1, 3, 6, 6)).astype(np.float32)
        g = np.ones((1, 3, 4, 4), np.float32)
        got = run(made, {"x": x, "y_grad": g})
        np.testing.assert_array_equal(got["y"], run(model, {"x": x})["y"])
        assert got["w_grad"].shape == (3, 3, 3, 3)
        np.testing.assert_allclose(np.vdot(got["x_grad"], x), np.vdot(got["y"], g), rtol=1e-5)
    assert model.SerializeToString() == before
