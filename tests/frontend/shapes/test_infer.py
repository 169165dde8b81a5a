"""Inferred dtypes and shapes, symbolic and through the bodies of an If, and what a failing inference leaves."""

from __future__ import annotations

import logging

import onnx_ir as ir
import pytest
from onnx import parser

from onnx_convgrad.frontend.shapes import infer
from onnx_convgrad.frontend.shapes.infer import InferShapes
from onnx_convgrad.ir.passes import run_passes


def _inferred(declared: str, body: str) -> dict[str, str]:
    text = f'<ir_version: 8, opset_import: ["" : 21]> g {declared} {{ {body} }}'
    model = ir.from_proto(parser.parse_model(text))
    assert run_passes(model, [InferShapes()])
    return {v.name or "": f"{v.dtype}{v.shape}" for node in model.graph for v in node.outputs}


def test_relations_between_symbols_are_kept() -> None:
    found = _inferred(
        "(float[N, 3, H, W] x) => (float y)",
        "t = Transpose <perm = [0, 2, 3, 1]> (x) u = Flatten (t) y = ReduceSum <keepdims = 0> (u)",
    )
    assert (found["t"], found["u"]) == ("FLOAT[N,H,W,3]", "FLOAT[N,3*H*W]")


def test_types_through_the_bodies_of_an_if() -> None:
    bodies = "then_branch = t () => (float[2] a) { a = Neg (x) }, else_branch = e () => (float[2] b) { b = Abs (x) }"
    found = _inferred("(bool c, float[2] x) => (float[2] y)", f"t = If (c) <{bodies}> y = Neg (t)")
    assert found["t"] == "FLOAT[2]"


def test_a_failing_inference_refuses_no_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of the library")

    monkeypatch.setattr(infer, "infer_symbolic_shapes", fail)
    with caplog.at_level(logging.INFO, "onnx_convgrad"):
        assert _inferred("(float[2, 3] x) => (float[2, 3] y)", "t = Neg (x) y = Neg (t)")["t"] == "FLOAT[2,3]"
    assert "a fault of the library" in caplog.text


def test_the_library_logs_again_afterwards() -> None:
    level = logging.getLogger("onnx_shape_inference").level
    _inferred("(float[2] x) => (float[2] y)", "y = Neg (x)")
    assert logging.getLogger("onnx_shape_inference").level == level
