"""Forward values that wait for the gradients in float16 or bfloat16."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.memory.timeline import timeline
from onnx_convgrad.runtime import run
from tests.memory.test_recompute import FEED, chain
from tests.support.families import export
from tests.support.one_input import graph_of
from tests.support.zoo import residual

ERROR = {"float16": 2e-3, "bfloat16": 2e-2}
"""Rounding errors of the stored values, with the few convolutions behind them."""


def _compared(model: onnx.ModelProto, feed: dict[str, np.ndarray], precision: str, **options: object) -> float:
    """The largest difference of a gradient, relative to its norm; all other results must have equal bits."""
    plain, narrow = (
        run(og.augment(model, training=True, memory=og.Memory(**options, activations=kept)), feed)
        for kept in (None, precision)
    )
    errors = []
    for name, value in plain.items():
        if name.endswith("_grad"):
            errors.append(np.linalg.norm(narrow[name] - value) / np.linalg.norm(value))
        else:
            assert narrow[name].tobytes() == value.tobytes()
    return max(errors)


@pytest.mark.parametrize("precision", ERROR)
@pytest.mark.parametrize("options", [{}, {"recompute": "auto"}, {"budget": "min"}], ids=str)
def test_gradients_are_rounded_and_outputs_are_not(precision: str, options: dict[str, object]) -> None:
    error = _compared(chain(blocks=2), FEED, precision, **options)
    assert 0 < error < ERROR[precision]


def test_views_of_kept_values() -> None:
    """The factors of a product are views of one value."""
    w = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    body = """a = MatMul(x, w) t = Tanh(a)
        rows = Constant<value_ints = [128, 32]>() u = Reshape(t, rows)
        columns = Constant<value_ints = [32, 128]>() v = Reshape(t, columns) y = MatMul(u, v)"""
    model = graph_of(f"(float[64, 64] x) => (float[128, 128] y) {{ {body} }}", opset=21, w=w)
    feed = {"x": np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)}
    feed["y_grad"] = np.random.default_rng(2).standard_normal((128, 128)).astype(np.float32)
    assert 0 < _compared(model, feed, "float16") < ERROR["float16"]


def test_large_values_overflow_in_float16_alone() -> None:
    model = graph_of("(float[64, 64] x) => (float[64, 64] y) { a = Exp(x) y = Mul(a, a) }", opset=21)
    feed = {"x": np.full((64, 64), 12, np.float32)}
    found = {
        precision: run(og.augment(model, wrt=["x"], cotangents="ones", memory=og.Memory(activations=precision)), feed)[
            "x_grad"
        ]
        for precision in ERROR
    }
    assert np.isinf(found["float16"]).all()
    np.testing.assert_allclose(found["bfloat16"], 2 * np.exp(24.0), rtol=ERROR["bfloat16"])


@pytest.mark.parametrize("precision", ERROR)
def test_a_step_needs_less_memory(precision: str) -> None:
    """In the order in which the runtime runs the nodes: a value that waits in float16 is not kept in float32 too."""
    torch.manual_seed(0)
    model = export(residual.resnet20().train(), torch.randn(32, 3, 32, 32), dynamo=False, training=True, opset=17)

    def held(**options: object) -> int:
        loss = {model.graph.output[0].name: "cross_entropy"}
        program = og.build_training(model, loss=loss, optimizer="sgd", outputs=[], **options)
        return max(timeline(ir.from_proto(program.step).graph).held)

    assert held(memory=og.Memory(activations=precision)) < 0.7 * held()


def test_a_name_that_is_none() -> None:
    with pytest.raises(og.errors.ArgumentError, match="'float16', 'bfloat16' or None, not 'float8'"):
        og.augment(chain(), memory=og.Memory(activations="float8"))
