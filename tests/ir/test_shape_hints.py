"""Hints name a real input of the model, with its rank and its known sizes."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onnx_convgrad.ir.shape_hints import input_shape_option


def value(name: str, shape: list[int | str | None] | None) -> ir.Value:
    return ir.Value(name=name, shape=None if shape is None else ir.Shape(shape))


@pytest.mark.parametrize(
    ("inputs", "option"),
    [
        ([value("image", ["N", 3, None, 32])], "image:8,3,64,32"),
        ([value("tokens", ["N", "T"])], "tokens:8,64"),
        ([value("fixed", [1, 2]), value("free", ["T", "N", 5])], "free:8,3,5"),
        ([value("fixed", [1, 2])], "fixed:1,2"),
        ([value("any", None)], "any:1,3,224,224"),
        ([], "NAME:1,3,224,224"),
    ],
    ids=["image", "tokens", "free", "fixed", "rank", "none"],
)
def test_an_example_of_the_option(inputs: list[ir.Value], option: str) -> None:
    assert input_shape_option(inputs) == f"--input-shape {option}"
