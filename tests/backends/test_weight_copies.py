"""For the target `portable`, products that read a stored weight in different ways have a copy each."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of

WEIGHTS = {
    "Gemm<transB = 1>(x, w)": ("float[3, 4] x", (4, 4)),
    "MatMul(x, w)": ("float[3, 4] x", (4, 4)),
    "Conv<pads = [1, 1, 1, 1]>(x, w)": ("float[2, 4, 5, 5] x", (4, 4, 3, 3)),
}


def gradient(call: str, x: str, shape: tuple[int, ...], target: str) -> onnx.ModelProto:
    declared = ", ".join(map(str, shape))
    model = graph_of(
        f"({x}) => (y) <float[{declared}] w = {{{', '.join(['0'] * int(np.prod(shape)))}}}> {{ y = {call} }}"
    )
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "w"))
    return og.augment(model, wrt="x", target=target)


def readers(model: onnx.ModelProto) -> list[set[str]]:
    """For each stored weight, the ways in which nodes read it."""
    stored = [t.name for t in model.graph.initializer if len(t.dims) > 1]
    ways = {name: set() for name in stored}
    for node in model.graph.node:
        for name in set(node.input) & set(stored):
            ways[name].add(f"{node.op_type} {[a.i for a in node.attribute if a.name == 'transB']}")
    return list(ways.values())


@pytest.mark.parametrize("call", WEIGHTS)
def test_each_way_to_read_a_square_weight_has_a_copy(call: str) -> None:
    x, shape = WEIGHTS[call]
    plain, portable = gradient(call, x, shape, "cpu"), gradient(call, x, shape, "portable")
    assert max(map(len, readers(plain))) == 2
    assert [len(ways) for ways in readers(portable)] == [1, 1]
    feed = {
        i.name: np.ones([d.dim_value for d in i.type.tensor_type.shape.dim], np.float32) for i in portable.graph.input
    }
    want, got = run(plain, feed), run(portable, feed)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-5)


def test_other_weights_are_stored_once() -> None:
    portable = gradient("Gemm<transB = 1>(x, w)", "float[3, 4] x", (5, 4), "portable")
    assert [len(ways) for ways in readers(portable)] == [2]
