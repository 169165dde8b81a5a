"""Remembered shapes are those of the library's own rules, whatever was inferred before."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest
from onnx_shape_inference import ShapeInferenceContext, registry

from onnx_convgrad.frontend.shapes import shape_rules_memo
from onnx_convgrad.frontend.shapes.shape_rules_memo import conv, remembered

Rule = Callable[[ShapeInferenceContext, ir.Node], None]


@pytest.fixture(scope="module")
def library() -> dict[str, Rule]:
    """Rules that the library registers, by the module that defines them: the registry may hold corrected ones."""
    from onnx_shape_inference._ops import _conv, _reshape, _slice

    registry.collect()
    return {"Conv": _conv.infer_conv, "Reshape": _reshape.infer_reshape, "Slice": _slice.infer_slice}


def data(*dims: int | str, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name="v", shape=ir.Shape(dims), type=ir.TensorType(dtype))


def ints(*values: int) -> ir.Value:
    value = data(len(values), dtype=ir.DataType.INT64)
    value.const_value = ir.tensor(list(values), dtype=ir.DataType.INT64)
    return value


def inferred(rule: Rule, op_type: str, *inputs: ir.Value, declared: Any = None, **attributes: Any) -> list[Any]:
    context = ShapeInferenceContext({"": 21}, policy="refine")
    node = ir.node(op_type, list(inputs), attributes)
    node.outputs[0].shape = declared
    rule(context, node)
    shape = node.outputs[0].shape
    assert node.outputs[0].dtype == inputs[0].dtype
    return [] if shape is None else [str(d) for d in shape]


CONVS: list[dict[str, Any]] = [
    {},
    {"pads": [1, 1, 1, 1]},
    {"strides": [2, 3], "pads": [0, 1, 2, 1]},
    {"dilations": [2, 1], "strides": [2, 2]},
    {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
    {"auto_pad": "VALID"},
    {"kernel_shape": [3, 3]},
]


@pytest.mark.parametrize("attributes", CONVS, ids=str)
def test_conv(library: dict[str, Rule], attributes: dict[str, Any]) -> None:
    fast = conv(library["Conv"])
    for height, channels in itertools.product((9, "h", "2*floor(h/2) + 1"), (2, 4)):
        operands = data("n", channels, height, "w"), data(6, channels, 3, 3)
        expected = inferred(library["Conv"], "Conv", *operands, **attributes)
        assert inferred(fast, "Conv", *operands, **attributes) == expected
        assert inferred(fast, "Conv", *operands, **attributes) == expected


def test_declared_shapes_are_refined_and_not_remembered(library: dict[str, Rule]) -> None:
    fast = remembered(library["Reshape"])
    operands = data("n", 4, 6), ints(0, -1)
    assert inferred(fast, "Reshape", *operands, declared=ir.Shape(["batch", None])) == ["batch", "24"]
    assert inferred(fast, "Reshape", *operands) == inferred(library["Reshape"], "Reshape", *operands) == ["n", "24"]
    assert inferred(fast, "Reshape", data("m", 4, 6), ints(0, -1)) == ["m", "24"]
    assert inferred(fast, "Reshape", data("n", 4, 6), ints(0, 2, -1)) == ["n", "2", "12"]


def test_invented_symbols_belong_to_one_node(library: dict[str, Rule]) -> None:
    """A size that the rule cannot know gets another symbol in each node of a graph."""
    fast, context = remembered(library["Reshape"]), ShapeInferenceContext({"": 21}, policy="refine")
    names = []
    for _ in range(2):
        node = ir.node("Reshape", [ir.Value(name="x", shape=ir.Shape(["n", 4]), type=ir.TensorType(ir.DataType.FLOAT)),
                                   ints(-1, 0)])  # fmt: skip
        node.inputs[1].const_value = ir.tensor([0, 0, 0], dtype=ir.DataType.INT64)  # type: ignore[union-attr]
        fast(context, node)
        assert node.outputs[0].shape is not None
        names.append(str(node.outputs[0].shape[2]))
    assert names[0] != names[1]


def test_an_attribute_or_an_operand_makes_a_difference(library: dict[str, Rule]) -> None:
    fast = remembered(library["Slice"])
    for end, dtype in ((2, ir.DataType.FLOAT), (3, ir.DataType.FLOAT), (3, ir.DataType.DOUBLE)):
        operands = data("n", 5, dtype=dtype), ints(0), ints(end), ints(1)
        assert inferred(fast, "Slice", *operands) == ["n", str(end)]


def test_the_memo_is_bounded(library: dict[str, Rule], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[ir.Node] = []

    def counted(context: ShapeInferenceContext, node: ir.Node) -> None:
        calls.append(node)
        library["Reshape"](context, node)

    monkeypatch.setattr(shape_rules_memo, "_MOST", 2)
    fast = remembered(counted)
    for size in (2, 3, 2, 4, 2):  # the third is remembered; 4 empties the memo
        assert inferred(fast, "Reshape", data("n", size), ints(-1)) == inferred(
            library["Reshape"], "Reshape", data("n", size), ints(-1)
        )
    assert len(calls) == 4
