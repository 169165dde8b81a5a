"""Empty, invalid and malformed models are refused, with the place of the fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnx_convgrad as og
from onnx_convgrad.errors import ModelError
from tests.support.one_input import of_rows


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{ a = Add (x, b) b = Relu (a) y = Relu (b) }", r"Node 'a' \(Add\) depends on its own result"),
        ("{ z = Relu (x) }", "The output 'y' is neither an input, nor an initializer, nor the result of a node"),
        ("{ y = Relu (x) y = Exp (x) }", "Output 'y' is redeclared in the current graph scope"),
        ("{ y = Einsum <equation = 'ab'> (x, x) }".replace("'", '"'), "a term for 1 of its 2 inputs"),
        (
            "{ y = Einsum <equation = '..->'> (x) }".replace("'", '"'),
            "its equation '..->' is not of the form 'ij,jk->ik'",
        ),
    ],
)
def test_wrong_models(body: str, message: str) -> None:
    with pytest.raises(og.ModelError, match=message):
        og.augment(of_rows(body), wrt="inputs")


WEIGHT = np.random.default_rng(0).standard_normal((3, 3, 3, 3)).astype(np.float32)


def one_node(op_type: str, inputs: str = "x w", **attributes: Any) -> onnx.ModelProto:
    """A model of one node, whose other operands are weights."""
    names = inputs.split()
    node = helper.make_node(op_type, names, ["y"], name="here", **attributes)
    infos = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 6, 6])]
    weights = [numpy_helper.from_array(WEIGHT, name) for name in names if name != "x"]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "g", infos, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


MALFORMED = [
    (one_node("Conv", "x"), "it has 1 input, and must have 2 to 3"),
    (one_node("Conv", "x w b c"), "it has 4 inputs"),
    (one_node("Relu", "x w"), "it has 2 inputs, and must have 1"),
    (one_node("Conv", auto_pad="SAME"), "its auto_pad is 'SAME', and must be one of NOTSET, SAME_UPPER"),
    (one_node("Conv", auto_pad="VALID", pads=[0, 0, 0, 0]), "both auto_pad=VALID and pads"),
    (one_node("Conv", strides=[1, 1, 1]), r"strides are \[1, 1, 1\], but 2 spatial axes take 2"),
    (one_node("ConvTranspose", strides=[0, 1]), r"strides are \[0, 1\], and must not be below 1"),
    (one_node("Conv", pads=[-1, 0, 0, 0]), "must not be below 0"),
    (
        one_node("Conv", strides=[2**63 - 1, 1]),
        r"strides are \[9223372036854775807, 1\], and no tensor has that many rows",
    ),
    (one_node("Conv", kernel_shape=[2, 2]), r"kernel_shape is \[2, 2\], but its weight has the kernel 3x3"),
    (one_node("Conv", strides=1), "strides is of type INT, and must be INTS"),
    (one_node("Conv", stride=[1, 1]), "an attribute 'stride', which Conv does not have"),
    (one_node("AveragePool", "x"), "its attribute kernel_shape is missing"),
    (one_node("Conv", group=0), "its group is 0, and must be a size above 0"),
    (
        one_node("DepthToSpace", "x", blocksize=-(2**63)),
        "its blocksize is -9223372036854775808, and must be a size above 0",
    ),
]


def test_a_window_without_axes_is_refused() -> None:
    with pytest.raises(ModelError, match="its kernel_shape is empty"):
        og.augment(of_rows("{ y = MaxPool <kernel_shape: ints = []> (x) }"), wrt="inputs")


@pytest.mark.parametrize(("model", "reason"), MALFORMED, ids=[reason for _, reason in MALFORMED])
def test_a_malformed_node_is_refused(model: onnx.ModelProto, reason: str) -> None:
    with pytest.raises(ModelError, match=rf"'here' \(\w+, opset 17\): .*{reason}"):
        og.augment(model, wrt="inputs")
