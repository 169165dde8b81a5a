"""Layers are found by the factors of their operators, also in files without shapes and for operators of a plugin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnx_convgrad as og
from onnx_convgrad.autodiff import registry
from onnx_convgrad.autodiff.factors import SUM, mix, notation
from onnx_convgrad.autodiff.layers import Features, convolves, layer_of
from onnx_convgrad.ir.call import SIGNATURES, signature
from tests.support.one_input import graph_of

Shape = Sequence[int] | None


def node(op_type: str, *shapes: Shape, **attributes: Any) -> ir.Node:
    """A node with operands of these shapes, of unknown ones for `None`."""
    operands = [ir.Value(shape=None if shape is None else ir.Shape(shape)) for shape in shapes]
    return ir.Node("", op_type, operands, ir.convenience.convert_attributes(attributes))


LAYERS = {
    "Conv": (node("Conv", [2, 3, 8, 8], [6, 3, 3, 3], [6]), True, (1, 1), Features(0, -3, 1), 6, 3),
    "groups": (node("Conv", [2, 6, 8], [9, 2, 3], group=3), True, (1, 1), Features(0, -2, 1), 9, 6),
    "transposed": (node("ConvTranspose", [2, 4, 8], [4, 5, 3]), True, (1, 0), Features(1, -2, 1), 5, 4),
    "transposed groups": (
        node("ConvTranspose", [2, 4, 8], [4, 5, 3], group=2),
        True,
        (1, 0),
        Features(1, -2, 2),
        10,
        4,
    ),
    "Gemm": (node("Gemm", [3, 2], [3, 5], transA=1), True, (0, 0), Features(1, -1, 1), 5, 3),
    "transB": (node("Gemm", [2, 3], [5, 3], [5], transB=1), True, (1, 1), Features(0, -1, 1), 5, 3),
    "MatMul": (node("MatMul", [2, 7, 3], [3, 5]), False, (2, 0), Features(1, -1, 1), 5, 3),
    "vector": (node("MatMul", [2, 3], [3]), False, (1, 0), None, None, 3),
    "Einsum": (node("Einsum", [2, 7, 3], [5, 3], equation="btk,ok->bto"), False, (2, 1), Features(0, -1, 1), 5, 3),
    "two axes": (node("Einsum", [2, 3], [3, 4, 5], equation="bk,kcd->bcd"), False, (1, 0), None, None, 3),
}


@pytest.mark.parametrize(
    ("product", "takes_bias", "summed", "features", "outputs", "channels"), LAYERS.values(), ids=LAYERS
)
def test_the_axes_of_a_weight(
    product: ir.Node,
    takes_bias: bool,
    summed: tuple[int, int],
    features: Features | None,
    outputs: int | None,
    channels: int,
) -> None:
    layer = layer_of(product)
    assert layer is not None
    assert (layer.weight, layer.takes_bias) == (product.inputs[1], takes_bias)
    assert (layer.summed, layer.features) == (summed, features)
    assert (layer.outputs, layer.channels) == (outputs, channels)
    assert layer.convolves == convolves(product) == product.op_type.startswith("Conv")


OTHERS = {
    "no sum": node("Mul", [2, 3], [3]),
    "table": node("Gather", [9, 3], [2]),
    "normalization": node("LayerNormalization", [2, 3], [3], [3]),
    "further data": node("DeformConv", [1, 2, 4, 4], [3, 2, 2, 2], [1, 8, 3, 3]),
    "two weights": node("RNN", [5, 2, 3], [1, 4, 3], [1, 4, 4], hidden_size=4),
    "three factors": node("Einsum", [2, 3], [3, 4], [4, 5], equation="ab,bc,cd->ad"),
    "too few operands": node("Conv", [1, 2, 4, 4]),
    "too many operands": node("MatMul", [2, 3], [3, 4], [4]),
    "wrong attribute": node("Conv", [1, 2, 4, 4], [3, 2, 2, 2], group="two"),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_no_layers(other: ir.Node) -> None:
    assert layer_of(other) is None


def test_an_operator_that_is_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """An activation within the operator, for example, is not known to relevance or a folded normalization."""
    declared = replace(registry.lookup("", "MatMul"), factors=notation("*i k, k o -> *i o", k=mix("multiplies")))
    monkeypatch.setitem(registry._RULES, ("", "MatMul"), declared)
    assert layer_of(node("MatMul", [2, 3], [3, 4])) is None


@pytest.mark.parametrize(
    ("product", "rank", "features"),
    [
        (node("Conv", None, [6, 3, 3, 3], None), None, Features(0, -3, 1)),
        (node("Conv", None, None, None), None, Features(0, -3, 1)),
        (node("MatMul", [2, 7, 3], None), 2, Features(1, -1, 1)),
        (node("MatMul", None, None), 2, Features(1, -1, 1)),
        (node("Gemm", None, None, None, transB=1), None, Features(0, -1, 1)),
    ],
)
def test_files_without_shapes(product: ir.Node, rank: int | None, features: Features) -> None:
    layer = layer_of(product, rank=rank)
    assert layer is not None
    assert layer.features == features
    assert layer.outputs in (None, 6)
    assert all(use.node is product for value in product.inputs if value is not None for use in value.uses())


def test_a_layer_of_a_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets a new head as other layers do; adapters refuse it by its name."""
    registry.load_rules()
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    monkeypatch.setitem(SIGNATURES, "acme::Dense", (("X", "W", "B"), ("Y",)))
    signature.cache_clear()
    factors = notation("*i k, o k, o -> *i o", k=SUM, broadcasts=True)
    declared = registry.vjp("acme::Dense", wrt=["X", "W", "B"], parameters=["W", "B"], factors=factors)
    declared(lambda *_: {})
    model = graph_of(
        "(float[N,6] x) => (float[N,4] y) { y = acme.Dense (x, w, b) }",
        domains=', "acme": 1',
        w=np.ones((4, 6), np.float32),
        b=np.ones(4, np.float32),
    )
    renewed = {t.name: list(t.dims) for t in og.transforms.replace_head(model, 7).graph.initializer}
    assert renewed == {"w": [7, 6], "b": [7]}
    with pytest.raises(og.errors.ArgumentError, match="for 'w', because adapters of Dense are not offered"):
        og.transforms.add_adapters(model, rank=1)
