"""Empty, invalid and malformed models are refused, with the place of the fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnx_convgrad as og
from onnx_convgrad.errors import ModelError
from onnx_convgrad.frontend.canonicalize import canonicalize
from onnx_convgrad.frontend.files import read
from onnx_convgrad.testing import Case, check
from tests.support.one_input import of_rows
from tests.support.operators import text_model


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
    with pytest.raises(og.errors.ModelError, match=message):
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


_WINDOWED = {
    "Conv": "float[1,1,4,4] x, float[1,1,2,2] w) => (float[1,1,A,B] y) { y = Conv <ATTR> (x, w) }",
    "ConvTranspose": "float[1,1,4,4] x, float[1,1,2,2] w) => (float[1,1,A,B] y) { y = ConvTranspose <ATTR> (x, w) }",
    "ConvInteger": "uint8[1,1,4,4] x, uint8[1,1,2,2] w) => (int32[1,1,A,B] y) { y = ConvInteger <ATTR> (x, w) }",
    "QLinearConv": "uint8[1,1,4,4] x, float s, uint8 p, uint8[1,1,2,2] w) => (uint8[1,1,A,B] y) "
    "{ y = QLinearConv <ATTR> (x, s, p, w, s, p, s, p) }",
    "DeformConv": "float[1,1,4,4] x, float[1,1,2,2] w, float[1,8,3,3] o) => (float[1,1,A,B] y) "
    "{ y = DeformConv <ATTR> (x, w, o) }",
    "MaxPool": "float[1,1,4,4] x) => (float[1,1,A,B] y) { y = MaxPool <KERNEL, ATTR> (x) }",
    "AveragePool": "float[1,1,4,4] x) => (float[1,1,A,B] y) { y = AveragePool <KERNEL, ATTR> (x) }",
    "LpPool": "float[1,1,4,4] x) => (float[1,1,A,B] y) { y = LpPool <KERNEL, ATTR> (x) }",
    "MaxUnpool": "float[1,1,2,2] x, int64[1,1,2,2] i) => (float[1,1,A,B] y) { y = MaxUnpool <KERNEL, ATTR> (x, i) }",
    "Col2Im": "float[1,4,4] x) => (float[1,1,5,5] y) <int64[2] i = {5,5}, int64[2] b = {2,2}> "
    "{ y = Col2Im <ATTR> (x, i, b) }",
}
_BAD = {
    "strides": ("[0,1]", "[-1,1]", "[1]", "[1,1,1]", "[9223372036854775807,1]"),
    "dilations": ("[0,1]", "[-1,1]", "[1]", "[1,1,1]", "[9223372036854775807,1]"),
    "pads": ("[-1,0,0,0]", "[1]", "[0,0,0]", "[0,0,0,9223372036854775807]"),
    "kernel_shape": ("[0,1]", "[-2,1]", "[2]", "[2,2,2]", "[9223372036854775807,1]"),
}


@pytest.mark.parametrize("operator", _WINDOWED)
@pytest.mark.parametrize(("attribute", "value"), [(key, value) for key, values in _BAD.items() for value in values])
def test_bad_windows_of_every_operator_are_refused(operator: str, attribute: str, value: str) -> None:
    """The error names the attribute, whether the operator is differentiated or not."""
    if attribute not in onnx.defs.get_schema(operator).attributes:
        pytest.skip(f"{operator} has no {attribute}")
    text, kernel = _WINDOWED[operator], "kernel_shape = [2,2]"
    if "KERNEL" in text and attribute == "kernel_shape":
        text, kernel = text.replace(", ATTR", ""), f"kernel_shape = {value}"
    text = text.replace("KERNEL", kernel).replace("ATTR", f"{attribute} = {value}")
    with pytest.raises(og.errors.ModelError, match=rf"its (kernel_shape|{attribute}|windows)"):
        canonicalize(read(text_model(f"({text}")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "float[1,64,1] x) => (float[A,B,C,D] y) <int64 s = {0}, int64 f = {8}> { y = STFT (x, s, , f) }",
            "frame_step is 0",
        ),
        (
            "float[1,64,1] x) => (float[A,B,C,D] y) <int64 s = {4}, int64 f = {-8}> { y = STFT (x, s, , f) }",
            "frame_length is -8",
        ),
        (
            "float[1,4,4] x) => (float[A,B,C,D] y) <int64[2] i = {5,5}, int64[2] b = {0,2}> { y = Col2Im (x, i, b) }",
            r"block_shape is \[0, 2\]",
        ),
        (
            "float[1,4,4,4] x, float[1,5] r) => (float[A,B,C,D] y) { y = MaxRoiPool <pooled_shape = [0,2]> (x, r) }",
            "pooled_shape",
        ),
        (
            (
                "float[1,4,4,4] x, float[1,4] r, int64[1] b) => (float[A,B,C,D] y) "
                "{ y = RoiAlign <output_height = 0> (x, r, b) }"
            ),
            "output_height is 0",
        ),
        ("float[1,4,4,4] x) => (float[A,B,C,D] y) { y = LRN <size = 0> (x) }", "size is 0"),
        ("float[1,4,4,4] x) => (float[A,B,C,D] y) { y = GlobalLpPool <p = 0> (x) }", "p is 0"),
    ],
)
def test_sizes_that_are_not_positive_are_refused(text: str, message: str) -> None:
    with pytest.raises(og.errors.ModelError, match=message):
        canonicalize(read(text_model(f"({text}")))


@pytest.mark.parametrize(
    ("equation", "shapes", "message"),
    [
        ("...i,...i->...", ["3", "2,3"], "ellipses for 0 and for 1 axes"),
        ("...,...->...", ["2,3", "3"], "ellipses for 1 and for 2 axes"),
        ("ij,jk->ik", ["2,3", "3"], "gives 2 axes to input 1, which has 1"),
        ("ij->i", ["2,3,4"], "gives 2 axes to input 0, which has 3"),
        ("...ijk->i...", ["2,3"], "gives 3 or more axes to input 0, which has 2"),
        ("i->i", [""], "gives 1 axes to input 0, which has 0"),
        ("ij,jk->ik", ["2,3", "4,5"], "has 'j' for axes of sizes 3 and 4"),
        ("...,...->...", ["2,3", "4,3"], "for axes of sizes 2 and 4"),
        ("ii->i", ["2,3"], "a diagonal of the axes 'i' of input 0, of sizes 2 and 3"),
        ("ij->k", ["2,3"], "has 'k' in its result, but in no input"),
        ("ij->ii", ["2,3"], "repeats an index in its result"),
        ("...->", ["2,3"], "has an ellipsis in an input, but not in its result"),
    ],
)
@pytest.mark.parametrize("inner", [False, True])
def test_equations_that_do_not_fit_are_refused(equation: str, shapes: list[str], message: str, *, inner: bool) -> None:
    """Also if the shapes of the operands follow only from those of the inputs."""
    names = "abc"[: len(shapes)]
    inputs = ", ".join(
        f"float[{shape}] {name}" if shape else f"float {name}" for name, shape in zip(names, shapes, strict=True)
    )
    nodes = " ".join(f"{name}s = Sin ({name})" for name in names) if inner else ""
    operands = ", ".join(name + "s" * inner for name in names)
    model = text_model(
        f'({inputs}) => (float[A] y) {{ {nodes} q = Einsum <equation = "{equation}"> ({operands}) y = Sin (q) }}'
    )
    with pytest.raises(og.errors.ModelError, match=f"its equation '{equation.replace('.', '[.]')}' .*{message}"):
        og.augment(model, wrt="inputs")


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [("...ij->ij", [(2, 3)]), ("ij->i...", [(2, 3)]), ("i,->i", [(2,), ()]), ("ij,jk->ik", [(2, 1), (4, 5)])],
)
def test_equations_that_the_runtime_takes_are_accepted(equation: str, shapes: list[tuple[int, ...]]) -> None:
    operands = [np.ones(shape, np.float32) for shape in shapes]
    check(Case("Einsum", operands, {"equation": equation}, dynamic=False))
